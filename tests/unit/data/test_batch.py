import pytest

from plsc.data.batch import BadSample, BadSampleList, new_images
from tests.devices import GPU


@pytest.mark.parametrize("device", [GPU])
def test_page_locked_memory_is_not_reused_while_it_is_copied(device):
    shape = (3, 1024, 1024)
    arrived = []
    for value in range(30):
        pixels, images = new_images(8, shape, pin=True)
        assert images.is_pinned()
        pixels[...] = value
        arrived.append(images.to(device, non_blocking=True))
        del pixels, images
    for value, images in enumerate(arrived):
        assert (images == value).all()


def sample(number: int, kind: str = "undecodable") -> BadSample:
    return BadSample(kind, f"images/{number}.jpg (label.txt:{number + 1}): is damaged")


def test_each_bad_sample_is_listed_once_also_when_a_run_resumes_and_up_to_a_limit(tmp_path, monkeypatch):
    (tmp_path / "bad_samples.txt").write_bytes(b"\xff\xfe\x00 what is this\n")
    BadSampleList(tmp_path).add([sample(1), sample(2, "missing")])
    resumed = BadSampleList(tmp_path)
    resumed.add([sample(1), sample(3)])
    assert resumed.path.read_bytes().splitlines()[1:] == [
        b"undecodable\timages/1.jpg (label.txt:2): is damaged",
        b"missing\timages/2.jpg (label.txt:3): is damaged",
        b"undecodable\timages/3.jpg (label.txt:4): is damaged",
    ]
    assert (resumed.counts["undecodable"], resumed.counts["missing"]) == (2, 1)
    monkeypatch.setattr("plsc.data.batch.MAX_LISTED", 5)
    (tmp_path / "other").mkdir()
    limited = BadSampleList(tmp_path / "other")
    limited.add([sample(number) for number in range(20)])
    assert len(limited.path.read_text().splitlines()) == 5
    assert limited.counts["undecodable"] == 20
