"""The tools around torch: training loops, adapters, files, averages, parametrisations."""

import copy
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import pslayers as ps

from .. import zoo
from ..oracle import assert_rows_right, loop, square, squares, true_rows

Rows = dict[str, Tensor]


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def labelled(n: int) -> TensorDataset:
    return TensorDataset(torch.randn(n, 6), torch.randint(0, 3, (n,)))


def cross_entropy_rows(model: nn.Module, x: Tensor, y: Tensor) -> Rows:
    """The loop, in the model's own dtype and as it stands: nothing of a later step reaches it."""
    plain = ps.restore_model(copy.deepcopy(model))
    rows = loop(plain, lambda out, i: F.cross_entropy(out, y[i : i + 1]), (x,))
    return {name: g for name, g in rows.items() if g is not None}


# ------------------------------------------------------------------------------------------------------ loops
@pytest.mark.parametrize("part", ["module", "net"])
def test_lightning(part: str) -> None:
    """The LightningModule itself converted, or the network that it holds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning = pytest.importorskip("lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.seen = classifier(), []

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            return F.cross_entropy(self(batch[0]), batch[1])

        def on_train_batch_start(self, batch: tuple[Tensor, Tensor], _: int) -> None:
            self.expected = cross_entropy_rows(self.net, *batch)

        def on_before_optimizer_step(self, _: torch.optim.Optimizer) -> None:
            rows = {name: p.grad_sample for name, p in self.net.named_parameters()}
            torch.testing.assert_close(rows, self.expected)
            self.seen.append(len(rows["0.weight"]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = Classifier()
    ps.convert_model(model if part == "module" else model.net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, DataLoader(labelled(10), batch_size=4))
    assert model.seen == [4, 4, 2]
    trainer.optimizers[0].zero_grad()
    assert all(p.grad_sample is None for p in model.parameters())


def bert() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 30,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 12,
    }
    config = transformers.BertConfig(
        **sizes, max_position_embeddings=10, num_labels=3, hidden_dropout_prob=0.0
    )
    config.attention_probs_dropout_prob = 0.0
    return transformers.BertForSequenceClassification(config)


def test_transformers_trainer(tmp_path: Path) -> None:
    model = bert()
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainerCallback, TrainingArguments

    ids, labels = torch.randint(0, 30, (6, 5)), torch.randint(0, 3, (6,))
    data: Any = [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]
    ps.convert_model(model, on_unsupported="general")
    seen: list[Rows] = []
    expected: list[Rows] = []

    class Read(TrainerCallback):
        def on_step_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
            expected.append({})
            plain = ps.restore_model(copy.deepcopy(model))
            plain.forward = lambda i, call=plain.forward: call(input_ids=i).logits
            rows = loop(plain, lambda out, i: F.cross_entropy(out, labels[i : i + 1]), (ids,))
            expected[-1] = {name: g for name, g in rows.items() if g is not None}

        def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
            seen.append({n: p.grad_sample for n, p in model.named_parameters() if p.grad_sample is not None})

    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=6,
        max_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        max_grad_norm=0.0,
        dataloader_pin_memory=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Read()]).train()
    assert len(seen) == len(expected) == 2
    for rows, true in zip(seen, expected, strict=True):
        assert set(rows) == set(true)
        for name, g in rows.items():  # the sampler has shuffled: compare what does not depend on the order
            torch.testing.assert_close(g.sum(0), true[name].sum(0), rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(_norms(g), _norms(true[name]), rtol=1e-4, atol=1e-6)


def _norms(rows: Tensor) -> Tensor:
    return rows.flatten(1).square().sum(1).sqrt().sort().values


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, (x, y) = classifier(), labelled(4).tensors
    expected = cross_entropy_rows(model, x, y)
    accelerator = accelerate.Accelerator(cpu=True)
    net, optimizer = accelerator.prepare(ps.convert_model(model), torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(F.cross_entropy(net(x), y))
    torch.testing.assert_close(
        {n: p.grad_sample for n, p in accelerator.unwrap_model(net).named_parameters()}, expected
    )
    optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad_sample is None for p in model.parameters())


# --------------------------------------------------------------------------------------------------- adapters
class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.query, self.value, self.out = (
            nn.Embedding(7, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 3),
        )

    def forward(self, ids: Tensor) -> Tensor:  # (B, T)
        x = self.tokens(ids)
        return self.out(torch.tanh(self.query(x)) * self.value(x)).mean(1)


@pytest.mark.parametrize("order", ["adapters first", "conversion first"])
def test_peft_lora(order: str) -> None:
    """Rows of the adapters alone; whoever converts first converts again once the adapters are there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = pytest.importorskip("peft")
    model, ids = Scores().double(), torch.randint(0, 7, (5, 3))
    if order == "conversion first":
        ps.convert_model(model)
    targets = ["query", "value", "tokens"]  # an embedding's adapters are bare parameters
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, lora_dropout=0.0)
    adapted = peft.get_peft_model(model, config).double()
    plain = ps.restore_model(copy.deepcopy(adapted))
    assert_rows_right(plain, ids, converted=ps.convert_model(adapted, on_unsupported="general"))
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert len(trained) == 6 and all("lora_" in name for name in trained)
    merged = ps.restore_model(adapted).merge_and_unload()
    torch.testing.assert_close(merged(ids), plain(ids))


# -------------------------------------------------------------------------------------------- files, averages
def test_state_is_saved_and_loaded_by_either_kind_of_model() -> None:
    plain, ids = zoo.Transformer().double(), torch.randint(0, 11, (3, 5))
    ours = ps.convert_model(zoo.Transformer().double())
    squares(ours(ids)).mean().backward()
    optimizer = torch.optim.Adam(ours.parameters())
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": ours.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    plain.load_state_dict(saved["model"])
    torch.optim.Adam(plain.parameters()).load_state_dict(saved["optimizer"])
    torch.testing.assert_close(plain(ids), ours(ids))
    ours.load_state_dict(plain.state_dict())
    ours.zero_grad()
    assert_rows_right(plain, ids, converted=ours)


def test_safetensors(tmp_path: Path) -> None:
    files = pytest.importorskip("safetensors.torch")
    plain, ids, path = (
        zoo.Transformer().double(),
        torch.randint(0, 11, (3, 5)),
        tmp_path / "model.safetensors",
    )
    ours = ps.convert_model(zoo.Transformer().double())
    squares(ours(ids)).mean().backward()
    files.save_model(ours, path)
    files.load_model(plain, path)
    torch.testing.assert_close(plain(ids), ours(ids))
    with torch.no_grad():
        for p in ours.parameters():
            p.zero_()
    files.load_model(ours, path)
    ours.zero_grad()
    assert_rows_right(plain, ids, converted=ours)


@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.9)])
def test_averaged_model(average: Any) -> None:
    """Averages are those of a plain model's steps, and the average has rows of its own."""
    plain, ids = zoo.Transformer().double(), torch.randint(0, 11, (3, 5))
    ours = ps.convert_model(copy.deepcopy(plain))
    averages = []
    for net in (plain, ours):
        optimizer, averaged = (
            torch.optim.SGD(net.parameters(), lr=0.002),
            AveragedModel(net, multi_avg_fn=average),
        )
        for _ in range(3):
            optimizer.zero_grad()
            squares(net(ids)).mean().backward()
            optimizer.step()
            averaged.update_parameters(net)
        averages.append(averaged)
    torch.testing.assert_close(averages[0](ids), averages[1](ids))
    assert_rows_right(ps.restore_model(copy.deepcopy(averages[1].module)), ids, converted=averages[1].module)


# ------------------------------------------------------------------------------------------- parametrisations
class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


PARAMETRISATIONS: dict[str, Any] = {
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "spectral_norm": parametrizations.spectral_norm,
    "symmetric": lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric()),
}


# weight_norm's kernel has no batched form
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", PARAMETRISATIONS)
def test_parametrised_before_conversion(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    PARAMETRISATIONS[name](model[0])
    model.double().eval()
    x = torch.randn(5, 4, dtype=torch.float64)
    ours = assert_rows_right(model, x, on_unsupported="general")
    # copies share the class that torch makes, and removing takes the weight from that class
    expected = model(x)
    parametrize.remove_parametrizations(ps.restore_model(ours)[0], "weight")
    torch.testing.assert_close(ours(x), expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("name", PARAMETRISATIONS)
def test_parametrised_after_conversion(name: str, used: bool) -> None:
    """Converted again, as after any change of the model's modules."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    ours, x = (
        ps.convert_model(copy.deepcopy(model), on_unsupported="general"),
        torch.randn(5, 4, dtype=torch.float64),
    )
    if used:
        squares(ours(x)).mean().backward()
    for net in (model, ours):
        torch.manual_seed(1)  # some draw numbers of their own
        PARAMETRISATIONS[name](net[0])
        net.zero_grad()
        net.eval()
    assert_rows_right(model, x, converted=ps.convert_model(ours, on_unsupported="general"))
    torch.testing.assert_close(ps.restore_model(ours)(x), model(x))


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", ["pruning", "weight_norm of old"])
def test_weights_made_by_hooks(name: str, order: str) -> None:
    """Layers whose weight a hook computes before each call, put there before or after conversion."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    ours, x = copy.deepcopy(model), torch.randn(5, 4, dtype=torch.float64)
    if order == "after":
        ps.convert_model(ours, on_unsupported="general")
    for net in (model, ours):
        prune.l1_unstructured(net[0], "weight", 0.3) if name == "pruning" else nn.utils.weight_norm(net[0])
    if order == "before":
        ps.convert_model(ours, on_unsupported="general")
    assert_rows_right(model, x, converted=ours)


def test_a_first_call_that_skips_a_layer_whose_weight_a_hook_has_made() -> None:
    """That of a call before is a view of what an optimizer has changed since."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.rnn(x)[0])

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block, self.head = nn.Embedding(11, 4), Recurrent(), nn.Linear(4, 3)

        def forward(self, ids: Tensor, *, skip: bool = False) -> Tensor:
            h = self.embed(ids)
            return self.head((h if skip else self.block(h)).mean(1))

    ours = ps.convert_model(Skips().double())
    prune.random_unstructured(ours.block.out, "weight", 0.3)
    x = torch.randint(0, 11, (4, 5))
    squares(ours(x)).mean().backward()
    torch.optim.SGD(ours.parameters(), 0.1).step()
    plain = Skips().double()
    plain.embed.load_state_dict(ours.embed.state_dict())
    plain.head.load_state_dict(ours.head.state_dict())
    x = x[:2]
    squares(ours(x, skip=True)).mean().backward()
    expected = true_rows(lambda i: squares(plain(x[i : i + 1], skip=True)).sum(), plain, len(x))
    for name, p in ours.named_parameters():
        if not name.startswith("block"):
            torch.testing.assert_close(p.grad_sample, expected[name])
        else:
            assert p.grad_sample is None


@pytest.mark.parametrize("make", [classifier, lambda: nn.Linear(6, 3)])
def test_a_shallow_copy_leaves_the_rows(make: Any) -> None:
    """The parameters are the same ones; a deep copy begins without."""
    ours, x = ps.convert_model(make().double()), torch.randn(4, 6, dtype=torch.float64)
    squares(ours(x)).mean().backward()
    held = [p.grad_sample for p in ours.parameters()]
    shallow, deep = copy.copy(ours), copy.deepcopy(ours)
    assert all(p.grad_sample is rows for p, rows in zip(ours.parameters(), held, strict=True))
    assert all(p is q for p, q in zip(ours.parameters(), shallow.parameters(), strict=True))
    assert all(getattr(p, "grad_sample", None) is None for p in deep.parameters())


# ----------------------------------------------------------------------------------------------------- swaps
class Weighted(nn.Module):
    """A tied weight, and a list of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(6))])
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x * self.scales[0])))


SWAPS: dict[str, Any] = {
    "double": lambda model: model.float().double(),
    "to": lambda model: model.to(torch.float32).to(torch.float64),
    "load": lambda model: model.load_state_dict({k: v.cos() for k, v in model.state_dict().items()}),
    "around": lambda model: nn.Sequential(model).double(),
}


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("make", [classifier, Weighted])
@pytest.mark.parametrize("cleared", [False, True])
def test_parameters_that_torch_swaps(make: Any, swap: str, cleared: bool) -> None:
    """torch swaps no tensor that has weak references; the rows of a batch of one, too."""
    model, x = make().double(), torch.randn(4, 6, dtype=torch.float64)
    ours = ps.convert_model(copy.deepcopy(model))
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for n in (4, 1, 3):
            assert_rows_right(model, x[:n], converted=ours)
            if cleared:
                ours.zero_grad()
            params = list(ours.parameters())
            for each in (model, ours):
                SWAPS[swap](each)
            assert all(p is q for p, q in zip(params, ours.parameters(), strict=True))
            assert all(getattr(p, "grad_sample", None) is None for p in params)
            ours.zero_grad()
        for n in (1, 3):  # what watches parameters does so still
            streamed: dict[str, Tensor] = {}
            with ps.streaming(ours, streamed.__setitem__):
                squares(ours(x[:n])).mean().backward()
            torch.testing.assert_close(streamed, dict(loop(model, square, (x[:n],))))
        with pytest.raises(RuntimeError, match="did not come through its layer"):
            (squares(ours(x)).mean() + params[0].square().sum()).backward()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
