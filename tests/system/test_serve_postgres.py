"""Two `plsc serve` with one database: shared entries, a lost connection."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from plsc.errors import DataError
from tests.postgres_server import PASSWORD
from tests.serving import export_model, serving

pytest.importorskip("fastapi", reason="plsc-torch[serve] is not installed")
pytest.importorskip("psycopg", reason="plsc-torch[postgres] is not installed")


def enrolled(client, image):
    return [one for one in client.search(image, k=20)["results"] if one["source"] == "enrolled"]


def test_two_servers_share_entries_and_outlive_a_crash_of_the_database(database, postgres, tmp_path):
    model = export_model(tmp_path)
    images = [path.read_bytes() for path in sorted((tmp_path / "faces/images").glob("*.png"))]
    with contextlib.ExitStack() as stack, (tmp_path / "log").open("w+") as log:
        pair = [stack.enter_context(serving(model, database, stderr=log)) for _ in range(2)]
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
