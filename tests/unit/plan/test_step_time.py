import math

import pytest

from plsc.cli import main
from plsc.plan import NODES, plan, plan_head
from plsc.plan.backbone import BackbonePlan
from plsc.plan.network import Transfer, all_reduce, total_seconds
from plsc.plan.rates import Rates, choose_rates
from plsc.plan.step_time import COMPUTED, SENT, step_time

RATES = Rates(product=1e12, backbone=2e12, copy=1e11, memory=1e11, network=1e9, latency=1e-5)


def backbone(gradients=4 * 2**20, parts=1, shards=1):
    return BackbonePlan(
        name="by hand",
        images=8,
        parts=parts,
        precision="float32",
        numbers=gradients // 4,
        stored={"parameters": gradients},
        step={"activations at their peak": 100},
        kept=50,
        # A product whose operations take longer than its bytes, twice; one of bytes alone.
        forward={(2 * 10**10, 10**8): 2, (0, 10**8): 1},
        backward={(4 * 10**10, 10**8): 2},
        update_bytes=10**8,
        gradient_bytes=gradients,
        shards=shards,
    )


@pytest.mark.parametrize(("ranks", "rounds"), [(1, 0), (2, 1), (8, 3), (9, 4), (1024, 10)])
def test_a_collective_takes_its_rounds_and_its_bytes(ranks, rounds):
    gather = Transfer("all-gather", "x", ranks * 1000, (ranks - 1) * 1000)
    expected = rounds * 1e-5 + (ranks - 1) * 1000 / 1e9
    assert gather.seconds(ranks, 1e9, 1e-5) == pytest.approx(expected)
    reduce = all_reduce("x", ranks, 1024_000)
    sent = 2 * (ranks - 1) * math.ceil(1024_000 / ranks)
    assert reduce.seconds(ranks, 1e9, 1e-5) == pytest.approx(2 * rounds * 1e-5 + sent / 1e9)


def test_a_backbone_takes_the_longer_of_operations_and_bytes_operator_by_operator():
    time = step_time(RATES, None, backbone(), 1, 8)
    assert time.parts["backbone"] == pytest.approx(2 * 0.01 + 0.001 + 2 * 0.02)
    assert time.parts["optimizer"] == pytest.approx(0.001)
    assert time.images_a_second == pytest.approx(8 / 0.062)
    assert time.efficiency == 1


def test_sums_of_gradients_hide_behind_the_backward_pass_but_for_the_last_bucket():
    one = backbone()
    first, last = one.transfers(2)
    time = step_time(RATES, None, one, 2, 16)
    assert first.seconds(2, 1e9, 1e-5) < 0.04  # the backward pass
    assert time.parts["gradients' sums"] == pytest.approx(last.seconds(2, 1e9, 1e-5))
    assert time.hidden == pytest.approx(first.seconds(2, 1e9, 1e-5))
    large = backbone(gradients=400 * 2**20, parts=4)
    time = step_time(RATES, None, large, 2, 16)
    sums = total_seconds(large.transfers(2), 2, 1e9, 1e-5)
    assert time.hidden == pytest.approx(0.04)  # of the last part alone
    assert time.parts["gradients' sums"] == pytest.approx(sums - 0.04)
    assert time.dominant == "gradients' sums"
    assert time.efficiency == pytest.approx(1 - time.parts["gradients' sums"] / time.total)


def test_a_head_takes_the_longer_of_its_products_and_its_rows_and_hides_no_network():
    for ratio, name, rate in ((1.0, "head's products", 1e12), (0.001, "head's rows", 1e15)):
        head = plan_head(1e6, ranks=4, ratio=ratio)
        rates = Rates(product=rate, copy=1e11, memory=1e11, network=1e9, latency=1e-5)
        time = step_time(rates, head, None, 4, 512)
        products, rows = head.operations / rate, head.rows_moved / 1e11
        assert time.parts[name] == max(products, rows)
        assert time.parts["head's samples"] == head.samples_moved / 1e11
        assert time.parts["head's network"] == total_seconds(head.transfers, 4, 1e9, 1e-5)
        assert set(time.parts) <= {*COMPUTED, *SENT}


def test_without_a_rate_that_it_needs_nothing_is_estimated():
    head = plan_head(1e5, ranks=2)
    for missing in ("product", "copy", "network"):
        known = {"product": 1e12, "copy": 1e11, "network": 1e9, missing: None}
        assert step_time(Rates(**known), head, None, 2, 256) is None
    assert plan(1e5, ranks=2).times == ()


def test_a_data_sheet_is_halved_and_a_given_rate_is_not():
    sheet = NODES["h100"]
    rates = choose_rates(node="h100", precision="bfloat16", network_rate=12.0)
    assert rates.product == 0.5 * sheet.products["bfloat16"]
    assert rates.network_of(8) == rates.network_of(64) == 12e9
    rates = choose_rates(node="h100", reached=1.0)
    assert rates.network_of(8) == sheet.node_network
    assert rates.network_of(9) == sheet.network
    assert rates.product == sheet.products["float32"]
    # Over the way to offloaded rows a data sheet of the device says nothing.
    assert choose_rates(node="a100", offload=True).copy is None


def test_the_command_estimates_clusters_and_calls_the_rates_an_assumption(capsys):
    flags = "--model SmallResNet --image 32 --batch 16 --classes 1e5 --ranks 4 --node a100"
    assert main(["plan", *flags.split(), "--precision", "bf16", "--micro_batches", "2"]) == 0
    printed = capsys.readouterr().out
    assert (
        "ESTIMATE of a step's time, at 50% of the data sheet's rates of a DGX A100, an" in printed
    )
    rows = [line.split() for line in printed.splitlines() if line.rstrip().endswith("%")]
    assert [row[0] for row in rows] == ["4", "8", "64", "1,024"]
    assert "16 images a rank in 2 micro-batches" in printed
    assert "Head and backbone, bytes a rank" in printed
