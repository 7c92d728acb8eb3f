"""Count the nearest sub-centres, and reduce a head to the dominant ones."""

import torch

from plsc.heads import (
    RowAdamW,
    RowSGD,
    ShardedHead,
    build_margin,
    copy_dominant,
    count_choices,
    new_counts,
)


def head_of(centers, dtype=torch.float32):
    return ShardedHead(5, 8, build_margin("curricularface"), centers=centers, row_dtype=dtype)


def test_counts_use_the_highest_cosine_independent_of_the_norm_of_class_weights():
    head = head_of(3)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.rand(5, 3, 1, generator=generator) * 10 + 0.1
    with torch.no_grad():
        head.weight.copy_(torch.randn(5, 3, 8, generator=generator) * lengths)
    embeddings = torch.randn(40, 8, generator=generator)
    labels = torch.randint(0, 5, (40,), generator=generator)
    counts = new_counts(head)
    count_choices(head, embeddings[:30], labels[:30], counts)
    count_choices(head, embeddings[30:], labels[30:], counts)
    expected = torch.zeros(5, 3, dtype=torch.int64)
    for x, y in zip(embeddings, labels, strict=True):
        cosines = torch.nn.functional.cosine_similarity(x[None], head.weight[y].detach())
        expected[y, cosines.argmax()] += 1
    assert torch.equal(counts, expected)
    assert counts.sum() == 40


def test_the_dominant_sub_centre_is_copied_with_its_state_and_the_running_statistics():
    for kind, dtype in ((RowSGD, torch.float32), (RowAdamW, torch.bfloat16)):
        head, small = head_of(3, dtype), head_of(1, dtype)
        rows, small_rows = kind(head), kind(small)
        for _ in range(3):  # so that weights, states and the running mean are not initial values
            head(torch.randn(10, 8, requires_grad=True), torch.arange(10) % 5).loss.backward()
            rows.step()
        counts = torch.tensor([[0, 5, 1], [2, 2, 2], [0, 0, 0], [1, 0, 9], [7, 0, 0]])
        copy_dominant(head, rows, counts, small, small_rows)
        best = [1, 0, 0, 2, 0]
        for c, k in enumerate(best):
            assert torch.equal(small.weight[c], head.weight[c, k])
            for name, state in rows.state[head.weight].items():
                assert torch.equal(small_rows.state[small.weight][name][c], state[c, k])
        assert small.step == 3
        assert small.margin.t == head.margin.t != 0
