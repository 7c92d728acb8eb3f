import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from plsc.data.pairs import write_pairs
from plsc.errors import DataError
from plsc.evaluate.embed import embed_images
from tests.distributed.launch import run_ranks

SHAPE = (3, 16, 16)


def png(seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue(), pixels


IMAGES = [png(seed)[0] for seed in range(7)]


class Network(torch.nn.Module):
    """A linear layer after dropout and batch norm, whose output depends on the mode."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.BatchNorm2d(3)
        self.drop = torch.nn.Dropout(0.5)
        self.frozen = torch.nn.BatchNorm1d(4).eval()
        self.linear = torch.nn.Linear(3 * 16 * 16, 4)
        self.calls = []

    def forward(self, input, label, is_train):
        self.calls.append((len(input), label, is_train, torch.is_inference_mode_enabled()))
        return self.frozen(self.linear(self.drop(self.norm(input)).flatten(1)))


def embed(network, images=IMAGES, **options):
    return embed_images(network, images, SHAPE, batch_size=3, device="cpu", **options)


def test_flip_adds_the_embedding_of_the_mirror_image():
    network = Network().eval()
    pixels = np.stack([png(seed)[1] for seed in range(7)]).transpose(0, 3, 1, 2)
    normalised = torch.from_numpy((pixels.astype(np.float32) - 127.5) / 128)
    mirrored = torch.from_numpy(normalised.numpy()[..., ::-1].copy())
    with torch.no_grad():
        plain, flipped = network(normalised, None, False), network(mirrored, None, False)
    embeddings = embed(network)
    assert embeddings.dtype == np.float32
    assert embeddings.shape == (7, 4)
    assert embeddings == pytest.approx((plain + flipped).numpy(), abs=1e-5)
    assert embed(network, flip=False) == pytest.approx(plain.numpy(), abs=1e-5)


def test_the_network_predicts_in_inference_mode_and_the_modes_of_its_parts_are_restored():
    network = Network()
    before = [module.training for module in network.modules()]
    embed(network, flip=False)
    assert network.calls == [(3, None, False, True), (3, None, False, True), (1, None, False, True)]
    assert [module.training for module in network.modules()] == before
    with pytest.raises(DataError):
        embed(network, [b"no image"])
    assert [module.training for module in network.modules()] == before
    assert network.norm.num_batches_tracked == 0


def test_the_error_for_a_bad_image_or_embedding_has_its_index():
    images = [*IMAGES[:4], IMAGES[4][:60], *IMAGES[5:]]
    with pytest.raises(DataError, match=r"^image 4 of lfw\.bin: "):
        embed(Network(), images, name="lfw.bin")

    class Diverged(torch.nn.Module):
        def forward(self, input, label, is_train):
            output = input.flatten(1).clone()
            output[len(input) - 1, 5] = np.inf
            return output

    with pytest.raises(DataError, match="image 2"):
        embed(Diverged())


@pytest.mark.slow
def test_every_rank_returns_all_embeddings_in_order_or_an_error(tmp_path):
    class Pixels(torch.nn.Module):
        def forward(self, input, label, is_train):
            return input.flatten(1)[:, ::5]

    images = [*IMAGES, IMAGES[0]]
    write_pairs(tmp_path / "pairs.bin", images, [True, False, True, False])
    run_ranks(Path(__file__).with_name("embed_rank.py"), 3, str(tmp_path))
    alone = embed(Pixels(), images)
    for rank in range(3):
        results = tmp_path / str(rank)
        assert np.array_equal(np.load(results / "good.npy"), alone)
        assert np.array_equal(np.load(results / "few.npy"), alone[:2])
        assert (results / "bad.txt").read_text().startswith("DataError: image 7 of pairs.bin: ")
        bug = "RuntimeError: out of memory" if rank == 1 else "DistributedError: rank 1"
        assert (results / "bug.txt").read_text().startswith(bug)
