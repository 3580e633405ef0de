"""pending"""
import pytest
import torch
import pslayers as ps
from .every_layer import EVERY


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature:UserWarning")
@pytest.mark.parametrize("name", ["PSLSTM", "PSGRU", "PSRNN"])
def test_complex_weights_of_recurrent_layers_are_refused(name: str) -> None:
    """Their walk over time takes no conjugates; the cells are right, by the test above."""
    suite, case = EVERY[name]
    layer = suite.build(case).to(torch.complex128)
    with pytest.raises(ps.ConversionError, match="holds complex weights"):
        suite.converted(layer)
