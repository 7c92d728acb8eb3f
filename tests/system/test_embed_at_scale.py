"""The code of docs/gallery.md, in the programs that it names, gives the embeddings of open_model."""

import os
import re
import shutil
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pytest

from plsc.export import open_model
from tests.hdfs_server import SHORT_JAVA
from tests.serving import ROOT, export_model

pytestmark = pytest.mark.slow
pytest.importorskip("onnxruntime", reason="plsc-torch[export] is not installed")
PAGE = (ROOT / "docs/gallery.md").read_text(encoding="utf-8")
NEEDS = {"Spark": "pyspark", "Ray": "ray", "Hugging Face datasets": "datasets"}
MORE_OF_SPARK = """
import gc
import pyarrow as pa, pyarrow.parquet as pq
from pyspark.sql.functions import lit
from onnxruntime import InferenceSession

replaced = batch_embedder("model", "content").in_spark(images.withColumn("embedding", lit("old")))
print(replaced.columns)

embedder = batch_embedder("model", "content")

def embed(found):
    for number, batch in enumerate(map(embedder, found)):
        about = {"batch": f"{os.getpid()} {number}", "process": os.getpid()}
        about["opened"] = sum(isinstance(one, InferenceSession) for one in gc.get_objects())
        kept = batch.select(["path", "embedding", "error"])
        for name, value in about.items():
            kept = kept.append_column(name, pa.array([value] * len(kept)))
        yield kept

spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 5)
fine = images.where("path not like '%damaged%'").repartition(2)
schema = "path string, embedding array<float>, error string, batch string, process long, opened long"
rows = fine.mapInArrow(embed, schema).collect()
pq.write_table(pa.Table.from_pylist([row.asDict() for row in rows]), "rows")
"""
"""After the code of the page, in its session: Spark takes long to start."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    model = export_model(folder)
    (folder / "faces/images/damaged.png").write_bytes(b"no image")
    return model


@pytest.fixture
def place(exported, tmp_path):
    """A folder with an exported model, and 24 images and one that is damaged."""
    for name in ("model", "faces"):
        shutil.copytree(exported.parent / name, tmp_path / name)
    return tmp_path


def run(code, folder):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "JAVA_TOOL_OPTIONS": " ".join(SHORT_JAVA),
    }
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def embed(model, paths):
    images = [model.preprocess(Path(path.removeprefix("file:")).read_bytes()) for path in paths]
    return model.embed(np.stack(images))


needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="there is no Java to run Spark")


@pytest.mark.parametrize(
    "program", [pytest.param(one, marks=needs_java if one == "Spark" else ()) for one in NEEDS]
)
def test_the_code_of_the_page_writes_the_embeddings_and_the_reason_for_a_damaged_image(place, program):
    pytest.importorskip(NEEDS[program], reason=f"{NEEDS[program]} is not installed")
    code = re.search(rf"^### {program}$.*?```python\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)[1]
    done = run(code + MORE_OF_SPARK if program == "Spark" else code, place)
    assert done.returncode == 0, done.stderr
    table = pa.dataset.dataset(place / "embeddings.parquet", exclude_invalid_files=True).to_table()
    assert len(table) == 25
    failed = [error is not None for error in table["error"].to_pylist()]
    assert failed == [row is None for row in table["embedding"].to_pylist()]
    assert sum(failed) == 1
    fine = table.filter([not one for one in failed])
    model = open_model(place / "model")
    if program == "Hugging Face datasets":  # keeps no metadata of schemas
        paths = [image["path"] for image in fine["image"].to_pylist()]
    else:
        paths = fine["path"].to_pylist()
        assert model.fingerprint in str(table.schema.metadata)
    expected = embed(model, [str(place / "faces/images" / Path(path).name) for path in paths])
    np.testing.assert_allclose(np.stack(fine["embedding"].to_numpy()), expected, atol=1e-6)
    if program == "Spark":
        check_spark(place, model, done.stdout)


def check_spark(place, model, output):
    """A column of the same name was replaced; two workers opened the model once each, and differ by 0."""
    assert "['path', 'modificationTime', 'length', 'content', 'embedding', 'error']" in output
    rows = pa.parquet.read_table(place / "rows").to_pylist()
    assert len(rows) == 24
    assert len({row["process"] for row in rows}) == 2
    assert {row["opened"] for row in rows} == {1}
    for _, batch in groupby(rows, key=lambda row: row["batch"]):
        batch = list(batch)
        found = np.array([row["embedding"] for row in batch], np.float32)
        assert np.array_equal(found, embed(model, [row["path"] for row in batch]))
