"""`plsc index`, `plsc search` and two `plsc serve` with one database: shared entries, a lost connection."""

import contextlib
import shutil

import pytest

from plsc.cli import main
from plsc.errors import DataError
from tests.postgres_server import PASSWORD, postgres_server
from tests.serving import export_model, serving

pytest.importorskip("fastapi", reason="plsc-torch[serve] is not installed")
psycopg = pytest.importorskip("psycopg", reason="plsc-torch[postgres] is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("serve_postgres")
    export_model(path)
    return path


@pytest.fixture(scope="module")
def server():
    yield from postgres_server()


@pytest.fixture
def url(server, request):
    name = request.node.name[:30]
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    with psycopg.connect(server.url(name), autocommit=True) as connection:
        connection.execute("CREATE EXTENSION vector")
    return server.url(name)


def test_two_servers_share_entries_and_outlive_a_crash_of_the_database(folder, url, server, tmp_path):
    images = [path.read_bytes() for path in sorted((folder / "faces/images").glob("*.png"))]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((tmp_path / "log").open("w+"))
        pair = [stack.enter_context(serving(folder / "model", url, stderr=log)) for _ in range(2)]
        first, second = (one.client() for one in pair)
        number = first.enrol("Ada", images[0])
        [found] = [one for one in second.search(images[0], k=9)["results"] if one["source"] == "enrolled"]
        assert (found["id"], found["name"]) == (number, "Ada")
        assert found["similarity"] == pytest.approx(1, abs=1e-5)
        server.kill()
        for client in (first, second):
            for call in (client.search, lambda image, client=client: client.enrol("lost", image)):
                with pytest.raises(DataError, match=r"503.*cannot be used|cannot be used.*503"):
                    call(images[1])
            assert client.encode(images[1]).shape == (8,)  # needs no database
        server.start()
        again = second.enrol("Grace", images[1])
        names = {one["id"]: one["name"] for one in first.search(images[1], k=9)["results"] if "id" in one}
        assert names[again] == "Grace"
        second.delete(number)
        assert "Ada" not in [one["name"] for one in first.search(images[0], k=9)["results"]]
        for one in pair:
            one.process.terminate()
            one.process.wait(60)
        printed = "".join([one.process.stdout.read() for one in pair])
        log.seek(0)
        assert PASSWORD not in printed + log.read()


def test_images_are_indexed_once_and_searched(folder, url, tmp_path, capsys, messages):
    images, model = folder / "faces/images", str(folder / "model")
    assert main(["index", model, url, "--images", str(images)]) == 0
    shown = url.replace(f"plsc:{PASSWORD}@", "")
    assert f"wrote {shown}: 24 images; 100.00% of the 10 nearest entries are found" in capsys.readouterr().out
    assert main(["search", model, url, str(images), "-k", "2"]) == 0
    found = [line for line in capsys.readouterr().out.splitlines() if "unknown" not in line]
    assert main(["search", model, url, str(images), "-k", "0"]) == 1
    assert "k is 0; expected the number of entries" in messages[-1]
    for image, nearest in zip(found[::3], found[1::3], strict=True):
        cosine, name = nearest.split(maxsplit=1)
        assert name == image
        assert abs(float(cosine) - 1) < 1e-3
    for arguments, noun in ([["--images", str(images)], "24 entries"], [[], "--images"]):
        assert main(["index", model, url, *arguments]) == 1
        assert noun in messages[-1]


def test_a_damaged_image_or_an_empty_table_is_one_message_and_nothing_is_enrolled(
    folder, url, tmp_path, messages
):
    images, model = shutil.copytree(folder / "faces/images", tmp_path / "images"), str(folder / "model")
    files = sorted(images.iterdir())
    files[-1].write_bytes(b"no image")
    assert main(["search", model, url, str(files[0])]) == 1
    assert "does not have entries of the network" in messages[-1]
    assert main(["index", model, url, "--images", str(images)]) == 1
    assert files[-1].name in messages[-1]
    assert main(["search", model, url, str(files[0])]) == 1
    assert "has no entries of this network" in messages[-1]
