"""Folders of the cache folder."""

from __future__ import annotations

from plsc.storage.cache_folder import folder_for


def test_each_url_and_kind_has_a_folder_of_its_own_that_ends_in_the_urls_name(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PLSC_CACHE_DIR", str(tmp_path))
    urls = ("s3://a/run", "s3://b/run", "hdfs://a/run")
    folders = {folder_for(kind, url) for url in urls for kind in ("runs", "checkpoints")}
    assert len(folders) == 6
    assert {folder.name for folder in folders} == {"run"}
    assert folder_for("runs", "s3://a/run/") == folder_for("runs", "s3://a/run")
    assert all(folder.parent.is_dir() and not folder.exists() for folder in folders)
