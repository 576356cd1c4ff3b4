"""A version is logged with the settings that its model reads, and with the code that it needs and no more."""

from __future__ import annotations

from pathlib import Path

from components.publish.release.mlflow_model import SETTINGS
from components.targets.forward.compiled import SOURCES
from storage.registry.log_version import SERVING, copy_of_components, share_code, share_files


def test_the_registry_logs_the_settings_that_the_model_reads() -> None:
    """MLflow drops settings that were not logged, without a word worth reading."""
    assert SERVING == SETTINGS


def test_the_code_goes_without_weights_and_caches_but_for_the_built_in_target(tmp_path: Path) -> None:
    for with_builtin in (False, True):
        place = copy_of_components(tmp_path / str(with_builtin), with_builtin)
        names = [path for path in place.rglob("*") if path.is_file()]
        sources = {source.name for source in SOURCES}
        assert sources <= {path.name for path in names}, "functions are compiled where the model is served"
        assert (place / "contract.py").is_file() and not any("__pycache__" in path.parts for path in names)
        assert any(path.suffix == ".safetensors" for path in names) is with_builtin


def test_a_version_and_its_release_share_large_files_and_each_outlives_the_other(tmp_path: Path) -> None:
    version, release, other = (tmp_path / name for name in ("version", "release", "other"))
    for place, content in ((version, "a"), (release, "a"), (other, "b")):
        (place / "inner").mkdir(parents=True)
        (place / "inner" / "weights").write_text(content * 70_000)
        (place / "small").write_text("x")
    share_files(version, [release, other, tmp_path])
    assert (version / "inner" / "weights").samefile(release / "inner" / "weights")
    assert not (version / "small").samefile(release / "small")
    assert (other / "inner" / "weights").read_text() == "b" * 70_000
    (release / "inner" / "weights").unlink()
    assert (version / "inner" / "weights").read_text() == "a" * 70_000
    assert sorted(path.name for path in (version / "inner").iterdir()) == ["weights"]


def test_versions_share_the_code_that_is_the_same_in_both(tmp_path: Path) -> None:
    earlier, folder = (copy_of_components(tmp_path / name, False) for name in ("earlier", "now"))
    (folder / "contract.py").write_text("changed")
    share_code(folder, earlier)
    shared = {file for file in folder.rglob("*.py") if file.samefile(earlier / file.relative_to(folder))}
    assert {*folder.rglob("*.py")} - shared == {folder / "contract.py"}
    assert (earlier / "contract.py").read_text() != "changed"
