import itertools
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from plsc.cli import main
from plsc.errors import OptionError
from plsc.heads import ROW_OPTIMIZERS, Execution, Sampling, ShardedHead, build_margin
from plsc.heads.kernels import choose_backend
from plsc.plan import plan, plan_head, run, tile_rows

ROOT = Path(__file__).resolve().parents[3]

COMBINATIONS = [
    (rows, optimizer, state)
    for rows, optimizer, state in itertools.product(
        ("float32", "bfloat16"), ("sgd", "adamw", "adagrad"), ("float32", "bfloat16", "int8")
    )
    if state != "int8" or optimizer == "sgd"
]


def make(classes, embedding, rows, optimizer, state, **options):
    head = ShardedHead(
        classes,
        embedding,
        build_margin("arcface", scale=64.0, margin=0.5),
        row_dtype=getattr(torch, rows),
        **options,
    )
    return head, ROW_OPTIMIZERS[optimizer](head, lr=0.1, state_dtype=state)


def step(head, batch, embedding):
    """Run one forward and backward pass; return the saved context."""
    generator = torch.Generator().manual_seed(1)
    embeddings = torch.randn(batch, embedding, generator=generator).requires_grad_()
    labels = torch.randint(head.class_num, (batch,), generator=generator)
    head(embeddings, labels).loss.backward()
    return head.contexts[-1]


@pytest.mark.parametrize("centers", [1, 3])
@pytest.mark.parametrize(("rows", "optimizer", "state"), COMBINATIONS)
def test_stored_bytes_equal_those_of_real_tensors(rows, optimizer, state, centers):
    # 300 columns need two scales of 256 in int8.
    head, updates = make(11, 300, rows, optimizer, state, centers=centers)
    real = {name: tensor.nbytes for name, tensor in updates.state[head.weight].items()}
    planned = plan_head(11, embedding=300, rows=rows, optimizer=optimizer, state=state, centers=centers)
    assert planned.stored == {"weight": head.weight.nbytes, **real}
    assert planned.stored_bytes == planned.bytes_per_class * 11


@pytest.mark.parametrize("classes", [1, 7, 12, 13])
def test_the_plan_is_for_the_largest_rank(classes):
    sizes = []
    for rank in range(4):
        group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 4)
        head, _ = make(classes, 8, "float32", "sgd", "float32", group=group)
        sizes.append(head.weight.nbytes)
    assert plan_head(classes, ranks=4, embedding=8).stored["weight"] == max(sizes)


@pytest.mark.parametrize(
    ("rows", "optimizer", "state", "expected"),
    [
        ("float32", "sgd", "float32", 4096),
        ("bfloat16", "sgd", "bfloat16", 2048),
        ("bfloat16", "sgd", "int8", 1544),
        ("bfloat16", "adagrad", "float32", 1028),
    ],
)
def test_bytes_per_class(rows, optimizer, state, expected):
    planned = plan_head(1e8, rows=rows, optimizer=optimizer, state=state)
    assert planned.bytes_per_class == expected
    assert planned.stored_bytes == expected * 10**8


def test_selected_rows_and_offloaded_copies_equal_those_of_a_real_step():
    head, updates = make(
        101,
        8,
        "float32",
        "adamw",
        "bfloat16",
        offload=True,
        sampling=Sampling(ratio=0.3),
        centers=2,
    )
    context = step(head, 4, 8)
    planned = plan_head(
        101,
        embedding=8,
        batch=4,
        ratio=0.3,
        optimizer="adamw",
        state="bfloat16",
        centers=2,
        offload=True,
    )
    assert planned.rows_in_play == len(context.rows)
    assert planned.step["copy of weight"] == context.rows.weight.nbytes
    share = len(context.rows) / (101 * 2)
    for name, tensor in updates.state[head.weight].items():
        assert planned.step[f"copy of {name}"] == round(tensor.nbytes * share)
    assert planned.device_bytes == sum(planned.step.values())
    assert planned.host_bytes == planned.stored_bytes + planned.host_copies


def test_offload_removes_class_weights_from_the_device():
    options = {"ranks": 8, "ratio": 0.01}
    here, away = plan_head(1e8, **options), plan_head(1e8, offload=True, **options)
    assert here.device_bytes > here.stored_bytes > 20 * away.device_bytes
    assert here.host_bytes == 0
    assert away.host_bytes > away.stored_bytes


@pytest.mark.parametrize("missing", [0, 1])
def test_exponentials_are_kept_exactly_if_the_head_keeps_them(missing):
    budget = 6 * 20 * 2 - missing
    head, _ = make(
        20,
        8,
        "float32",
        "sgd",
        "float32",
        execution=Execution(keep_bytes=budget, kernels="torch"),
    )
    kept = step(head, 6, 8).kept
    planned = plan_head(20, embedding=8, batch=6, keep_bytes=budget)
    assert planned.keeps_terms == (kept is not None) == (missing == 0)
    assert planned.step.get("kept exponentials") == (None if kept is None else kept.nbytes)
    assert any("keep_bytes" in note for note in planned.notes) == (missing == 1)


@pytest.mark.parametrize(("keep_bytes", "factor"), [(0, 8), (10**6, 6)])
def test_operations_equal_those_of_the_real_products(keep_bytes, factor):
    head, updates = make(
        50,
        16,
        "float32",
        "sgd",
        "float32",
        execution=Execution(keep_bytes=keep_bytes, kernels="torch", tile=20),
    )
    with FlopCounterMode(display=False) as counter:
        step(head, 6, 16)
        updates.step()
    planned = plan_head(50, embedding=16, batch=6, keep_bytes=keep_bytes)
    assert planned.operations == counter.get_total_flops() == factor * 6 * 50 * 16


@pytest.mark.parametrize("batch", [1, 64, 100, 1000, 5000, 100_000])
def test_tiles_equal_those_of_the_torch_backend(batch):
    passes = choose_backend("torch", torch.device("cpu"), torch.float32, torch.float32, None, batch)
    assert tile_rows(batch) == passes.tile


def test_step_memory_does_not_grow_with_the_classes():
    assert plan_head(1e6, batch=512).step == plan_head(1e8, batch=512).step


def test_uneven_batches_are_padded_to_the_largest():
    even, uneven = plan_head(10, ranks=2, batch=[6, 6]), plan_head(10, ranks=2, batch=[6, 1])
    assert even == plan_head(10, ranks=2, batch=6)
    moved = {t.content: (t.payload, t.sent) for t in uneven.transfers}
    for transfer in even.transfers:
        if transfer.collective != "all-reduce":
            assert moved[transfer.content] == (transfer.payload, transfer.sent)
    assert moved["two sums per sample"] == (2 * 7 * 4, 2 * 7 * 4)


def test_integers_may_be_floats_such_as_1e8():
    assert plan(1e2, batch=8.0) == plan(100, batch=8)


def test_the_answer_lists_changes_that_make_the_plan_fit():
    assert (
        plan(1e6, ranks=8).answer == f"fits in 80 GB: {plan(1e6, ranks=8).device_bytes / 1e9:.3g} GB per rank"
    )
    big = plan(1e8, ranks=4)  # 102 GB of class weights and momentum per rank
    assert big.render().startswith(f"does not fit in 80 GB: {big.device_bytes / 1e9:.3g} GB per rank; ")
    ways = {
        "--rows bfloat16 --state bfloat16": {"rows": "bfloat16", "state": "bfloat16"},
        "--rows bfloat16 --optimizer adagrad --state float32": {
            "rows": "bfloat16",
            "optimizer": "adagrad",
        },
        "--ratio 0.1 --offload": {"ratio": 0.1, "offload": True},
        "--ranks 8": {"ranks": 8},
    }
    sizes = {flags: plan(1e8, **{"ranks": 4, **way}) for flags, way in ways.items()}
    assert all(one.device_bytes <= 80e9 for one in sizes.values())
    shown = [f"{flags} ({one.device_bytes / 1e9:.3g} GB)" for flags, one in sizes.items()]
    assert big.answer.endswith("; fits with " + " or ".join(shown))
    assert "fits with --ranks" not in plan(1e8, ranks=2, batch=[3, 4]).answer


def test_the_answer_includes_head_and_backbone(monkeypatch):
    monkeypatch.setattr(run, "DEVICE", 195 * 10**6)
    both = plan(1e4, model="SmallResNet", image=(3, 32, 32), batch=64)
    assert both.head.device_bytes < run.DEVICE < both.device_bytes
    assert "--micro_batches 4 (" in both.answer


def test_one_rank_sends_nothing():
    assert plan_head(10).transfers == ()
    assert "Network traffic per step: none" in plan(10).render()


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"classes": 0}, "classes is 0; expected an integer from 1 to"),
        ({"classes": 1.5}, "classes is 1.5; expected an integer"),
        ({"classes": math.inf}, "classes is inf; expected a number"),
        ({"classes": math.nan}, "classes is nan; expected a number"),
        ({"ranks": 0}, "ranks is 0; expected a number between 1 and 1000000"),
        ({"embedding": -1}, "embedding is -1; expected"),
        ({"batch": 0}, "batch is 0; expected"),
        ({"batch": [3, 3], "ranks": 3}, "expected one size per rank [(]ranks: 3[)]"),
        ({"batch": [0]}, "not all 0"),
        ({"ratio": 0.0}, "ratio is 0.0; expected a number greater than 0 and at most 1"),
        ({"ratio": math.nan}, "ratio is nan"),
        ({"rows": "fp8"}, "rows is 'fp8'; expected one of float32, bfloat16"),
        ({"optimizer": "lamb"}, "optimizer is 'lamb'; expected one of sgd, adamw, adagrad"),
        ({"state": "int4"}, "state is 'int4'; expected one of float32, bfloat16, int8"),
        ({"state": "int8", "optimizer": "adamw"}, "adamw does not support; use float32 or"),
        ({"centers": 0}, "centers is 0; expected"),
        ({"keep_bytes": -1}, "keep_bytes is -1; expected an integer from 0 to"),
        ({"embedding_dtype": "int8"}, "embedding_dtype is 'int8'; expected one of"),
        ({"precision": "int8"}, "precision is 'int8'; expected one of float32"),
        ({"batch": 1.5}, "batch is 1.5; expected an integer"),
    ],
)
def test_invalid_plan_values_raise_with_the_expected_value(wrong, expected):
    with pytest.raises(OptionError, match=expected):
        plan(**{"classes": 10, **wrong})


def test_notes_warn_of_large_batches_and_useless_offload():
    assert "up to 128, more than" in plan(1000, ratio=0.01).render()
    assert "offload saves no memory" in plan(1000, offload=True).render()
    assert plan_head(1e6, ratio=0.01).notes == ()


def test_the_command_prints_bytes_and_units(capsys):
    arguments = "plan --classes 1e8 --ranks 8 --rows bfloat16 --state int8 --offload --ratio 0.1"
    assert main(arguments.split()) == 0
    printed = capsys.readouterr().out
    assert (
        printed.strip()
        == plan(10**8, ranks=8, rows="bfloat16", state="int8", offload=True, ratio=0.1).render()
    )
    (weight,) = (line for line in printed.splitlines() if line.startswith("  weight "))
    assert weight.split() == ["weight", "11.92", "GiB", "12,800,000,000"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "nothing to plan; set classes (--classes) to plan the head, model"),
        (
            ["--model", "ResNet18", "--optimizer", "adamw"],
            "optimizer is an option of the head; also set classes",
        ),
        (
            ["--classes", "1e3", "--checkpoint", "all"],
            "checkpoint is an option of the backbone; also set model",
        ),
        (["--classes", "many"], "--classes is 'many'; expected a number"),
        (["--classes", "10", "--head.offload", "no way"], "expected True or False"),
        (["--classes", "10", "--rows", "fp8"], "rows is 'fp8'; expected one of"),
        (["--classes", "10", "--rankz", "8"], "did you mean --ranks?"),
    ],
)
def test_the_command_reports_invalid_flags_in_one_line(arguments, expected, capsys):
    assert main(["plan", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("plsc: error: ")
    assert expected in error
    assert len(error.strip().splitlines()) == 1


def test_a_plan_accepts_the_option_names_of_a_run(capsys):
    theirs = "plan --head.class_num 1e6 --ranks 8 --head.sample_ratio 0.1 --head.offload true"
    assert main(theirs.split()) == 0
    printed = capsys.readouterr().out
    assert printed.strip() == plan(10**6, ranks=8, ratio=0.1, offload=True).render()


def test_planning_a_head_does_not_import_torch():
    code = (
        "import sys; from plsc.cli import main; main(['plan', '--classes', '10']); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"classes": 10**400}, "expected a number"),
        ({"classes": 1e308}, "to 1e+15"),
        ({"ranks": 10**12}, "expected a number between 1 and 1000000"),
        ({"batch": []}, "expected one batch size per rank, not all 0"),
        ({"ratio": "half"}, "ratio is 'half'; expected a number"),
        ({"offload": "no"}, "offload is 'no'; expected True or False"),
        ({"rows": ["float32"]}, "rows is ['float32']; expected a string"),
        ({"model": 5}, "model is 5; expected a string"),
        (
            {"model": "SmallResNet", "image": None},
            "image is None; expected an integer or a list of integers",
        ),
        ({"model": "SmallResNet", "image": 2**62}, "the network cannot be planned, "),
        ({"model": "SmallResNet", "embedding": 0}, "embedding is 0; expected a number between 1 and"),
        ({"model": "SmallResNet", "checkpoint": None}, "checkpoint is None; expected a string"),
    ],
)
def test_a_value_of_the_wrong_type_raises_in_any_plan(wrong, expected):
    with pytest.raises(OptionError) as caught:
        plan(**{"classes": 1000, "batch": 4, **wrong})
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
