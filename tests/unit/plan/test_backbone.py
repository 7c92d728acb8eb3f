import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from plsc.config.optim import OptimOptions
from plsc.errors import OptionError
from plsc.models import BaseModel, build_model, neck, resnet
from plsc.models.checkpointing import checkpoint_activations
from plsc.models.layers import use_torch_layers
from plsc.optim.optimizers import build_optimizer
from plsc.plan import plan_backbone
from plsc.plan.measure import MemoryCount
from tests.saved_tensors import kept_bytes

BATCH = 16
SMALL = {"image": (3, 32, 32), "embedding": 64, "batch": BATCH}


class Plain(BaseModel):
    """A linear layer, for manual counts: images [b, 3, 4, 4], 6 outputs."""

    def __init__(self, emb_size=6):
        super().__init__()
        self.fc = nn.Linear(48, emb_size, bias=False)

    def build_network(self, input, label, is_train=True):
        return self.fc(input.flatten(1)).tanh()


class Asking(Plain):
    """Reads the values of its input."""

    def build_network(self, input, label, is_train=True):
        return super().build_network(input, label) if input.sum().item() < 0 else input


def real_step(network, count, dtype=None):
    """Run a step in the context `count`; return the bytes that the forward pass kept."""
    images = torch.randn(BATCH, 3, 32, 32)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        output = network(images)
    kept = getattr(count, "live", None)
    output.float().backward(torch.ones_like(output, dtype=torch.float32))
    return kept


@pytest.mark.parametrize("name", ["sgd", "adamw", "adagrad", "adafactor"])
def test_stored_bytes_equal_those_of_real_tensors(name):
    network = build_model("SmallResNet", 64, (3, 32, 32))
    groups = [{"params": list(network.parameters())}]
    optimizer = build_optimizer(OptimOptions(optimizer=name), groups, 0.1, torch.device("cpu"))
    real_step(network, None)
    optimizer.step()
    states = [v for one in optimizer.state.values() for v in one.values() if torch.is_tensor(v)]
    planned = plan_backbone("SmallResNet", backbone_optimizer=name, **SMALL)
    assert planned.numbers == sum(p.numel() for p in network.parameters())
    assert planned.stored == {
        "parameters": sum(p.nbytes for p in network.parameters()),
        "gradients": sum(p.grad.nbytes for p in network.parameters()),
        f"{name} states": sum(state.nbytes for state in states),
        "buffers": sum(buffer.nbytes for buffer in network.buffers()),
    }


@pytest.mark.parametrize("checkpoint", ["none", "all"])
def test_operations_equal_torchs_count_of_a_real_step(checkpoint):
    network = build_model("SmallResNet", 64, (3, 32, 32)).train()
    checkpoint_activations(network, checkpoint)
    with FlopCounterMode(display=False) as counter:
        real_step(network, None)
    planned = plan_backbone("SmallResNet", checkpoint=checkpoint, **SMALL)
    assert planned.operations == counter.get_total_flops()


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("checkpoint", ["none", "all"])
def test_activations_equal_those_of_a_real_step(checkpoint, precision, monkeypatch):
    monkeypatch.setattr(resnet, "Conv2d", nn.Conv2d)  # plsc's Conv2d needs more memory in bfloat16 on a CPU
    network = build_model("SmallResNet", 64, (3, 32, 32), dropout=0.4).train()
    use_torch_layers(network)
    checkpoint_activations(network, checkpoint)
    with MemoryCount(network) as count:
        kept = real_step(network, count, torch.bfloat16 if precision == "bf16" else None)
    planned = plan_backbone("SmallResNet", checkpoint=checkpoint, precision=precision, **SMALL)
    assert planned.kept == pytest.approx(kept, rel=0.01)
    assert planned.step["activations, peak"] == pytest.approx(count.peak, rel=0.02)


def test_cpu_implementations_of_layers_are_not_planned(monkeypatch):
    ours = plan_backbone("SmallResNet", precision="bf16", **SMALL)
    monkeypatch.setattr(resnet, "Conv2d", nn.Conv2d)
    monkeypatch.setattr(neck, "PReLU", nn.PReLU)
    assert plan_backbone("SmallResNet", precision="bf16", **SMALL) == ours


def test_kept_activations_equal_tensors_saved_by_autograd():
    # An independent count, with saved-tensor hooks.
    network = build_model("SmallResNet", 64, (3, 32, 32), dropout=0.4).train()
    images = torch.randn(BATCH, 3, 32, 32)
    kept, output = kept_bytes(network, images, network.state_dict().values())
    planned = plan_backbone("SmallResNet", **SMALL)
    assert planned.kept == pytest.approx(kept + output.nbytes, rel=0.02)


def test_operations_of_a_layer_equal_a_manual_count():
    planned = plan_backbone(f"{__name__}:Plain", image=(3, 4, 4), embedding=6, batch=8)
    assert planned.operations == 2 * (2 * 8 * 48 * 6)  # forward and weight gradient


def test_checkpointing_costs_operations_and_micro_batches_save_memory():
    plain = plan_backbone("SmallResNet", **SMALL)
    again = plan_backbone("SmallResNet", checkpoint="all", **SMALL)
    parts = plan_backbone("SmallResNet", micro_batches=4, **SMALL)
    assert again.kept < 0.6 * plain.kept
    assert plain.operations < again.operations < 4 / 3 * plain.operations
    assert parts.operations == plain.operations
    assert parts.kept < 0.3 * plain.kept


def test_sharding_divides_stored_memory_and_gathers_active_blocks():
    whole = plan_backbone("SmallResNet", ranks=4, **SMALL)
    parts = plan_backbone("SmallResNet", ranks=4, backbone_shards=4, **SMALL)
    for name in ("parameters", "gradients", "sgd states"):
        assert parts.stored[name] == -(-whole.stored[name] // 4)
    assert parts.step["gathered parameters and their gradients"] <= 2 * whole.stored["parameters"]
    assert {one.collective for one in parts.transfers} == {"all-gather", "reduce-scatter"}
    copies = plan_backbone("SmallResNet", ranks=8, backbone_shards=4, **SMALL)
    assert {one.collective for one in copies.transfers} >= {"all-reduce"}


def test_transfers_include_the_gradients_of_all_parameters():
    (transfer,) = plan_backbone("SmallResNet", ranks=4, **SMALL).transfers
    gradients = plan_backbone("SmallResNet", **SMALL).stored["gradients"]
    assert (transfer.payload, transfer.sent) == (gradients, 2 * 3 * -(-gradients // 4))
    assert plan_backbone("SmallResNet", **SMALL).transfers == ()


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"model": "ResNet19"}, "model is 'ResNet19'; expected"),
        ({"precision": "int8"}, "precision is 'int8'; expected one of float32"),
        ({"image": 30}, "image_shape is"),
        ({"micro_batches": 0}, "micro_batches is 0; expected a number of at least 1"),
        ({"micro_batches": BATCH + 1}, "micro_batches is 17; expected at most the batch size per rank, 16"),
        ({"backbone_optimizer": "a.b:c"}, "a factory is not supported here: use the one of sgd, adam"),
        ({"checkpoint": "layer1"}, "'layer1', which matches no module of SmallResNet"),
        ({"backbone_optimizer": "sdg"}, "backbone_optimizer is 'sdg'"),
        ({"backbone_shards": 3, "ranks": 4}, "backbone_shards is 3; expected a divisor of the 4"),
        ({"model": f"{__name__}:Asking"}, "fails with fake tensors: DataDependentOutput"),
    ],
)
def test_invalid_plan_values_raise_with_the_expected_value(wrong, expected):
    with pytest.raises(OptionError, match=expected):
        plan_backbone(**{"model": "SmallResNet", **SMALL, **wrong})
