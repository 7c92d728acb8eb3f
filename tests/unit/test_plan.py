"""The sizes of a plan against real tensors, and its answer."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from plsc.cli import main
from plsc.errors import OptionError
from plsc.heads import ROW_OPTIMIZERS, Execution, Sampling, ShardedHead, build_margin
from plsc.models import BaseModel, build_model
from plsc.models.recomputation import recompute_activations
from plsc.models.resnet import use_torch_layers
from plsc.optim import build_optimizer
from plsc.plan import plan, plan_head

BATCH = 16
CPU = {"runtime.device": "cpu", "head.class_num": 10}
SMALL = {
    **CPU,
    "model.name": "SmallResNet",
    "model.image_shape": (3, 32, 32),
    "model.emb_size": 64,
    "train.batch_size": BATCH,
}


class Plain(BaseModel):
    """A linear layer: images [b, 3, 4, 4], 6 outputs."""

    def __init__(self, emb_size=6):
        super().__init__()
        self.fc = nn.Linear(48, emb_size, bias=False)

    def build_network(self, input, label, is_train=True):
        return self.fc(input.flatten(1)).tanh()


class Asking(Plain):
    """Reads the values of its input."""

    def build_network(self, input, label, is_train=True):
        return super().build_network(input, label) if input.sum().item() < 0 else input


def make(classes, embedding, rows="float32", optimizer="sgd", state="float32", **options):
    margin = build_margin("arcface", scale=64.0, margin=0.5)
    head = ShardedHead(classes, embedding, margin, row_dtype=getattr(torch, rows), **options)
    return head, ROW_OPTIMIZERS[optimizer](head, lr=0.1, state_dtype=state)


def step(head, batch, embedding):
    """Run one forward and backward pass; return the saved context."""
    generator = torch.Generator().manual_seed(1)
    embeddings = torch.randn(batch, embedding, generator=generator).requires_grad_()
    labels = torch.randint(head.class_num, (batch,), generator=generator)
    head(embeddings, labels).loss.backward()
    return head.contexts[-1]


@pytest.mark.parametrize("centers", [1, 3])
@pytest.mark.parametrize(
    ("rows", "optimizer", "state"),
    [
        ("float32", "sgd", "float32"), ("bfloat16", "sgd", "bfloat16"), ("int8", "sgd", "bfloat16"),
        ("bfloat16", "adamw", "bfloat16"), ("int8", "adamw", "float32"), ("float32", "adagrad", "bfloat16"),
    ],
)  # fmt: skip
def test_stored_bytes_of_the_head_equal_those_of_real_tensors(rows, optimizer, state, centers):
    head, updates = make(11, 300, rows, optimizer, state, centers=centers)
    real = {name: tensor.nbytes for name, tensor in updates.state[head.weight].items()}
    planned = plan_head({
        "head.class_num": 11, "model.emb_size": 300, "head.row_dtype": rows, "head.optimizer": optimizer,
        "head.state_dtype": state, "head.sub_centers": centers,
    })  # fmt: skip
    assert planned.stored == {"weight": head.weight.nbytes, **real}
    assert planned.stored_bytes == planned.bytes_per_class * 11


@pytest.mark.parametrize("classes", [1, 7, 12, 13])
def test_the_plan_is_for_the_largest_rank(classes):
    sizes = []
    for rank in range(4):
        group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 4)
        sizes.append(make(classes, 8, group=group)[0].weight.nbytes)
    planned = plan_head({"head.class_num": classes, "model.emb_size": 8, "runtime.world_size": 4})
    assert planned.stored["weight"] == max(sizes)


def test_offloaded_copies_equal_those_of_a_real_step():
    sampling = Sampling(ratio=0.3)
    head, updates = make(101, 8, "float32", "adamw", "bfloat16", offload=True, sampling=sampling, centers=2)
    context = step(head, 4, 8)
    planned = plan_head({
        "head.class_num": 101, "model.emb_size": 8, "train.batch_size": 4, "head.sample_ratio": 0.3,
        "head.optimizer": "adamw", "head.state_dtype": "bfloat16", "head.sub_centers": 2,
        "head.offload": True,
    })  # fmt: skip
    assert planned.step["copy of weight"] == context.rows.weight.nbytes
    share = len(context.rows) / (101 * 2)
    for name, tensor in updates.state[head.weight].items():
        assert planned.step[f"copy of {name}"] == round(tensor.nbytes * share)
    assert planned.device_bytes == sum(planned.step.values())


@pytest.mark.parametrize("missing", [0, 1])
def test_softmax_terms_are_kept_exactly_if_the_head_keeps_them(missing):
    budget = 2 * 64 * 8192 - missing  # 1 MiB
    execution = Execution(keep_bytes=budget, kernels="torch")
    kept = step(make(8192, 8, execution=execution)[0], 64, 8).kept
    sizes = {"head.class_num": 8192, "model.emb_size": 8, "train.batch_size": 64}
    planned = plan_head({**sizes, "head.execution": {"keep_mb": budget / 2**20}})
    assert planned.step.get("kept softmax terms") == (None if kept is None else kept.nbytes)
    assert (kept is None) == (missing == 1)


@pytest.mark.parametrize("name", ["sgd", "adamw", "adagrad", "adafactor"])
def test_stored_bytes_of_the_backbone_equal_those_of_real_tensors(name):
    network = build_model("SmallResNet", 64, (3, 32, 32))
    groups = [{"params": list(network.parameters())}]
    optimizer = build_optimizer(name, groups, 0.1)
    network(torch.randn(BATCH, 3, 32, 32)).sum().backward()
    optimizer.step()
    states = [v for one in optimizer.state.values() for v in one.values() if torch.is_tensor(v)]
    planned = plan({**SMALL, "optim.optimizer": name}).backbone
    assert planned.stored == {
        "parameters": sum(p.nbytes for p in network.parameters()),
        "gradients": sum(p.grad.nbytes for p in network.parameters()),
        f"{name} states": sum(state.nbytes for state in states),
        "buffers": sum(buffer.nbytes for buffer in network.buffers()),
    }


@pytest.mark.parametrize(("recompute", "precision"), [("none", "float32"), ("all", "bfloat16")])
def test_activations_are_within_15_percent_of_what_a_real_step_allocates(recompute, precision):
    network = build_model("SmallResNet", 64, (3, 32, 32)).train()
    use_torch_layers(network)
    if recompute == "all":
        recompute_activations(network)

    def real_step():
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            output = network(torch.randn(256, 3, 32, 32))
        output.float().sum().backward()

    real_step()  # allocates the gradients
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        real_step()
    events = [one for one in profiled.profiler.kineto_results.events() if one.name() == "[memory]"]
    events.sort(key=lambda one: one.start_ns())
    peak = max(itertools.accumulate(one.nbytes() for one in events))
    options = {"train.batch_size": 256, "memory.recompute": recompute, "precision.mode": precision}
    assert plan({**SMALL, **options}).backbone.step["activations"] == pytest.approx(peak, rel=0.15)


def test_micro_batches_save_activations():
    whole, parts = (plan({**SMALL, "train.micro_batches": parts}).backbone.step for parts in (1, 4))
    assert parts["activations"] < 0.5 * whole["activations"]


def test_a_moving_average_is_stored_too():
    planned = plan({**SMALL, "optim.ema_decay": 0.99}).backbone
    assert planned.stored["moving average"] == planned.stored["parameters"] + planned.stored["buffers"]


def test_the_answer_says_how_many_classes_would_fit():
    options = {**SMALL, "head.class_num": 10**8, "model.emb_size": 512}
    big = plan(options, ranks=4)  # 102 GB of class weights and momentum per rank
    assert not big.fits
    assert big.device_bytes == big.head.device_bytes + big.backbone.device_bytes
    first, *_ = big.render().splitlines()
    assert "77,800,000 classes" in first
    assert 77_800_000 <= big.most_classes < 77_900_000
    for more in (0, 1):
        assert plan({**options, "head.class_num": big.most_classes + more}, ranks=4).fits == (not more)


def test_the_global_batch_size_is_divided_over_the_ranks():
    options = {**SMALL, "train.global_batch_size": 4 * BATCH}
    assert plan(options, ranks=4) == plan(SMALL, ranks=4)


def test_the_command_takes_the_flags_of_a_run(capsys):
    flags = [f"--{path}={list(one) if isinstance(one, tuple) else one}" for path, one in SMALL.items()]
    assert main(["plan", "--ranks", "2", "--device_gb", "1", *flags]) == 0
    printed = capsys.readouterr().out.strip()
    assert printed == plan(SMALL, ranks=2, device_gb=1).render()
    (line,) = (line for line in printed.splitlines() if line.startswith("    parameters "))
    assert line.split() == ["parameters", "5.1", "MB"]


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"model.name": f"{__name__}:Asking"}, "DataDependentOutput"),
        ({"optim.optimizer": "a.b:c"}, "optimizer"),
        ({"head.loss_type": "arcface"}, "sharded head"),
        ({"train.batch_sice": 4}, "'train.batch_sice'"),
    ],
)
def test_options_that_cannot_be_planned_raise(wrong, expected):
    with pytest.raises(OptionError, match=expected):
        plan({**SMALL, **wrong})
