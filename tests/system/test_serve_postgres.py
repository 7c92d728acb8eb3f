"""`plsc index`, `plsc search` and two `plsc serve` with one database: shared entries, a lost connection."""

import contextlib
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from plsc.cli import main
from plsc.errors import DataError
from tests.postgres_server import PASSWORD
from tests.serving import export_model, serving

pytest.importorskip("fastapi", reason="plsc-torch[serve] is not installed")
pytest.importorskip("psycopg", reason="plsc-torch[postgres] is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("serve_postgres")
    export_model(path)
    return path


def enrolled(client, image):
    return [one for one in client.search(image, k=20)["results"] if one["source"] == "enrolled"]


def test_two_servers_share_entries_and_outlive_a_crash_of_the_database(folder, database, postgres, tmp_path):
    images = [path.read_bytes() for path in sorted((folder / "faces/images").glob("*.png"))]
    with contextlib.ExitStack() as stack, (tmp_path / "log").open("w+") as log:
        pair = [stack.enter_context(serving(folder / "model", database, stderr=log)) for _ in range(2)]
        first, second = (one.client() for one in pair)
        number = first.enrol("Ada", images[0])
        [found] = enrolled(second, images[0])
        assert (found["id"], found["name"]) == (number, "Ada")
        assert found["similarity"] == pytest.approx(1, abs=1e-5)
        last = second.enrol("Grace", images[1])
        postgres.kill()
        try:
            pool = stack.enter_context(ThreadPoolExecutor())
            lost = [
                pool.submit(call, images[1])
                for client in (first, second)
                for call in (client.search, lambda image, client=client: client.enrol("lost", image))
            ]
            assert all("503" in str(one.exception()) for one in lost)
            assert {type(one.exception()) for one in lost} == {DataError}
            assert first.encode(images[1]).shape == (8,)  # needs no database
        finally:
            postgres.start()
        again = second.enrol("Joan", images[1])
        names = {one["id"]: one["name"] for one in enrolled(first, images[1])}
        assert names == {number: "Ada", last: "Grace", again: "Joan"}
        second.delete(number)
        assert {one["id"] for one in enrolled(first, images[0])} == {last, again}
        for one in pair:
            one.process.terminate()
            one.process.wait(60)
        printed = "".join([one.process.stdout.read() for one in pair])
        log.seek(0)
        assert PASSWORD not in printed + log.read()


def test_images_are_indexed_once_and_searched(folder, database, capsys, messages):
    images, model = folder / "faces/images", str(folder / "model")
    assert main(["index", model, database, "--images", str(images)]) == 0
    shown = database.replace(f"plsc:{PASSWORD}@", "")
    assert f"wrote {shown}: 24 images; 100.00% of the 10 nearest entries are found" in capsys.readouterr().out
    assert main(["search", model, database, str(images), "-k", "2"]) == 0
    found = [line for line in capsys.readouterr().out.splitlines() if "unknown" not in line]
    assert main(["search", model, database, str(images), "-k", "0"]) == 1
    assert "k is 0; expected the number of entries" in messages[-1]
    for image, nearest in zip(found[::3], found[1::3], strict=True):
        cosine, name = nearest.split(maxsplit=1)
        assert name == image
        assert abs(float(cosine) - 1) < 1e-3
    for arguments, noun in ([["--images", str(images)], "24 entries"], [[], "--images"]):
        assert main(["index", model, database, *arguments]) == 1
        assert noun in messages[-1]


def test_a_damaged_image_or_an_empty_table_is_one_message_and_nothing_is_enrolled(
    folder, database, tmp_path, messages
):
    images, model = shutil.copytree(folder / "faces/images", tmp_path / "images"), str(folder / "model")
    files = sorted(images.iterdir())
    files[-1].write_bytes(b"no image")
    assert main(["search", model, database, str(files[0])]) == 1
    assert "does not have entries of the network" in messages[-1]
    assert main(["index", model, database, "--images", str(images)]) == 1
    assert files[-1].name in messages[-1]
    assert main(["search", model, database, str(files[0])]) == 1
    assert "has no entries of this network" in messages[-1]
