"""The blocking client is what the generator makes of the asyncio one."""

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "generate_sync_client.py"


@pytest.fixture
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_sync_client", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_generated_module_is_current(
    generator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [str(SCRIPT), "--check"])
    generator.main()


def test_every_generated_module_says_so_first(generator: ModuleType) -> None:
    for source, target in generator.GENERATED.items():
        first = (generator.CLIENT / target).read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith(f"# Generated from {source} by scripts/generate_sync_client.py")


def test_a_module_whose_source_has_changed_is_not_current(
    generator: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("aio.py", "sync.py"):
        shutil.copy(generator.CLIENT / name, tmp_path)
    monkeypatch.setattr(generator, "CLIENT", tmp_path)
    monkeypatch.setattr(generator, "GENERATED", {"aio.py": "sync.py"})
    monkeypatch.setattr("sys.argv", [str(SCRIPT), "--check"])
    generator.main()
    with (tmp_path / "aio.py").open("a", encoding="utf-8") as file:
        file.write("\n\nasync def more(client: AsyncClient) -> None:\n    await client.close()\n")
    with pytest.raises(SystemExit, match=r"not current: sync\.py; run "):
        generator.main()
    monkeypatch.setattr("sys.argv", [str(SCRIPT)])
    generator.main()
    written = (tmp_path / "sync.py").read_text(encoding="utf-8")
    assert written.endswith("\n\ndef more(client: Client) -> None:\n    client.close()\n")
