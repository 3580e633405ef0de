"""examples/tour.ipynb: its cells run in order, without a kernel, and give what is kept in the file."""

import json
import re
from typing import Any

import pytest
import torch

from .loading import EXAMPLES

NOTEBOOK = json.loads((EXAMPLES / "tour.ipynb").read_text())
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
EPOCHS = "range(8)"


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def test_the_cells_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for package in ("sklearn", "matplotlib", "tqdm"):
        pytest.importorskip(package)
    import matplotlib
    import matplotlib.pyplot as plt

    monkeypatch.setattr(matplotlib, "rcParams", matplotlib.rcParams.copy())
    matplotlib.use("Agg")
    shown: list[Any] = []
    monkeypatch.setattr(plt, "show", lambda: (shown.append(plt.gcf()), plt.close()))
    threads, scope = torch.get_num_threads(), {"__name__": "__main__"}
    assert [EPOCHS in source(cell) for cell in CELLS].count(True) == 1
    try:
        for cell in CELLS:
            exec(compile(source(cell).replace(EPOCHS, "range(3)"), "tour.ipynb", "exec"), scope)
    finally:
        torch.set_num_threads(threads)
    out = capsys.readouterr().out
    for line in ("grad_sample (64, 16, 1, 3, 3)  grad (16, 1, 3, 3)\n", "Conv2d False\n"):
        assert line in out and line in kept("text")
    right = re.search(r"(\d+)% of the scans are told right", out)
    assert right is not None and int(right[1]) > 30
    assert len(shown) == 2 and float(scope["cosine"].diagonal().sub(1).abs().max()) < 1e-4  # type: ignore[attr-defined]


OUTPUTS = [output for cell in CELLS for output in cell["outputs"]]


def kept(kind: str) -> str:
    """Of all outputs in the file."""
    found = [output.get("text", output.get("data", {}).get(kind, [])) for output in OUTPUTS]
    return "".join("".join(each) for each in found)


def test_what_is_kept_was_run_in_order_and_names_no_machine() -> None:
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    assert "right: 8 parameters x 6 samples" in kept("text/plain") and kept("image/png").count("iVBOR") == 2
    texts = re.sub(r'"image/png": "[^"]*"', "", json.dumps(NOTEBOOK))
    assert not re.search(r"/(home|root|tmp|work|Users|usr)/|Traceback|Warning", texts)
    assert "'.[examples]'" in source(NOTEBOOK["cells"][0])
