import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from plsc.errors import DataError, PlscError
from plsc.evaluate.embed import embed_images
from plsc.parallel.world import World
from tests.distributed.launch import run_ranks
from tests.distributed.worker import run_worker

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


class Pixels(torch.nn.Module):
    """Returns the pixels, so that each image has a different embedding, or fails."""

    def __init__(self, fails=False):
        super().__init__()
        self.fails = fails

    def forward(self, input, label, is_train):
        if self.fails:
            raise RuntimeError("out of memory")
        return input.flatten(1)[:, ::5]


CASES = {
    "good": [*IMAGES, IMAGES[0]], "few": IMAGES[:2], "bad": [*IMAGES, b"no image"], "bug": IMAGES,
}  # fmt: skip


def main():
    """On a rank: save what is embedded, or the error, to FOLDER/RANK/CASE.npy or .txt."""
    world = World.from_environment(device="cpu", timeout_seconds=60)
    output = Path(sys.argv[1]) / str(world.rank)
    output.mkdir()
    for case, images in CASES.items():
        network = Pixels(fails=case == "bug" and world.rank == 1)
        how = {"batch_size": 2, "device": "cpu", "world": world, "name": "pairs.bin"}
        try:
            np.save(output / f"{case}.npy", embed_images(network, images, SHAPE, **how))
        except (PlscError, RuntimeError) as error:
            (output / f"{case}.txt").write_text(f"{type(error).__name__}: {error}")
    world.close()


@pytest.mark.slow
def test_every_rank_returns_all_embeddings_in_order_or_an_error(tmp_path):
    run_ranks(__file__, 3, str(tmp_path))
    alone = embed(Pixels(), CASES["good"])
    for rank in range(3):
        results = tmp_path / str(rank)
        assert np.array_equal(np.load(results / "good.npy"), alone)
        assert np.array_equal(np.load(results / "few.npy"), alone[:2])
        assert "DataError: rank 1: image 7 of pairs.bin: " in (results / "bad.txt").read_text()
        assert "rank 1: could not embed pairs.bin: RuntimeError" in (results / "bug.txt").read_text()


if __name__ == "__main__":
    run_worker(main)
