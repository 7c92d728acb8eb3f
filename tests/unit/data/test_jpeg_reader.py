import pickle
import random

import numpy as np
import pytest

from plsc.data.decode import decode_image
from plsc.errors import DataError
from plsc.utils import jpeg_reader
from tests.unit.data.conftest import encode, smooth_picture


def test_arc_train_yields_each_image_once_shuffled_normalised_and_randomly_mirrored(label_folder):
    folder = label_folder(12, classes=12)
    listed = jpeg_reader.get_train_image_list(str(folder))
    assert listed == [(str(folder / f"images/{i}.jpg"), i) for i in range(12)]
    reader = jpeg_reader.arc_train(folder, 12, image_shape=(3, 24, 20))
    random.seed(0)
    first, second = list(reader()), list(reader())
    assert sorted(label for _, label in first) == list(range(12))
    assert [label for _, label in first] != [label for _, label in second]
    mirrored = 0
    for image, label in first:
        data = (folder / f"images/{label}.jpg").read_bytes()
        plain = (decode_image(data, (3, 24, 20)).numpy().astype(np.float32) - 127.5) / 128
        is_plain, is_mirrored = (np.array_equal(image, p) for p in (plain, plain[..., ::-1]))
        assert is_plain != is_mirrored
        mirrored += is_mirrored
    assert 0 < mirrored < 12
    assert first[0][0].dtype == np.float32
    with pytest.raises(DataError, match=r"label 2 at .*label\.txt:3"):
        jpeg_reader.arc_train(folder, 2)


def test_pair_files_are_loaded_with_and_without_flip(tmp_path):
    images = [encode(smooth_picture(i), "PNG") for i in range(4)]
    for name in ("lfw", "cfp_fp"):
        (tmp_path / f"{name}.bin").write_bytes(pickle.dumps((images, [True, False])))
    loaded, names = jpeg_reader.test(tmp_path, "lfw, cfp_fp", image_size=(24, 20))
    assert names == ["lfw", "cfp_fp"]
    (plain, flipped), is_same = loaded[0]
    assert is_same == [True, False]
    assert plain.shape == (4, 3, 24, 20)
    assert plain.dtype == flipped.dtype == np.float32
    expected = (np.array(smooth_picture(2)).transpose(2, 0, 1).astype(np.float32) - 127.5) / 128
    assert np.array_equal(plain[2], expected)
    assert np.array_equal(flipped[2], expected[..., ::-1])
    (tmp_path / "bad.bin").write_bytes(pickle.dumps(([images[0], b"not an image"], [True])))
    with pytest.raises(DataError, match=r"image 1 of .*bad\.bin"):
        jpeg_reader.load_bin(tmp_path / "bad.bin", 16)
    with pytest.raises(DataError, match="gone"):
        jpeg_reader.test(tmp_path, "gone")
