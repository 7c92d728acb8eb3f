import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PLSC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"
