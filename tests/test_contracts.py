"""What the rest of the world relies on: which files ship, what they may import, how long a file may be, what runs."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from transformers.dynamic_module_utils import check_imports, get_relative_import_files, get_relative_imports

from modeling_dsx_encoder.configuration_dsx_encoder import AUTO_MAP

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "modeling_dsx_encoder"
SHIPPED = sorted(PACKAGE.glob("*_dsx_encoder.py"))
HOME = sorted(set(PACKAGE.glob("*.py")) - set(SHIPPED))
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
# Folders that the project's own commands make; everything else is the project.
MADE = {"build", "dist", "runs", "outputs", "__pycache__", "shared"}
ALLOWED = {"torch", "transformers", "huggingface_hub"} | sys.stdlib_module_names


def name_of(path):
    return path.name


@cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path):
    """Yield (level, module, names) of every import, those inside functions too."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", [alias.name for alias in node.names]


def project_files():
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if name not in MADE and not name.endswith(".egg-info") and (not name.startswith(".") or name == ".ci")
        ]
        for name in files:
            if (
                Path(name).suffix in (".py", ".md", ".toml", ".txt", ".yaml", ".json", ".jsonl", "")
                and name != "LICENSE"
            ):
                yield Path(folder, name)


# ------------------------------------------------------------------------------------------------------------ shipping


def test_six_files_ship():
    assert [path.stem for path in SHIPPED] == [
        "attention_dsx_encoder",
        "configuration_dsx_encoder",
        "layouts_dsx_encoder",
        "losses_dsx_encoder",
        "modeling_dsx_encoder",
        "positions_dsx_encoder",
    ]


@pytest.mark.parametrize("path", SHIPPED, ids=name_of)
def test_shipped_files_import_only_what_everybody_has(path):
    for level, module, names in imports_of(path):
        assert level <= 1, f"from {'.' * level}{module}: transformers copies the files flat"
        if level == 1:
            assert module, f"from . import {', '.join(names)}: transformers does not see such a file; name it"
            assert module in {shipped.stem for shipped in SHIPPED}, f"from .{module}: that file does not ship"
        else:
            assert module.split(".")[0] in ALLOWED, f"import {module}: not everybody has it"
            assert module.split(".")[0] != "huggingface_hub" or module == "huggingface_hub.dataclasses"
            assert module.split(".")[0] != "importlib", "files found at run time are not copied"


@pytest.mark.parametrize("path", SHIPPED, ids=name_of)
def test_transformers_scanner_finds_the_siblings_and_nothing_else(path):
    siblings = {module for level, module, _ in imports_of(path) if level == 1}
    # The scanner reads text, so words at the start of a docstring's line count for it too.
    assert set(get_relative_imports(path)) == siblings
    assert set(check_imports(path)) == siblings
    assert {Path(name).name for name in get_relative_import_files(path)} <= {shipped.name for shipped in SHIPPED}


def test_the_model_file_pulls_in_every_shipped_file():
    needed = {Path(name).name for name in get_relative_import_files(PACKAGE / "modeling_dsx_encoder.py")}
    assert needed | {"modeling_dsx_encoder.py"} == {path.name for path in SHIPPED}


@pytest.mark.parametrize("path", SHIPPED, ids=name_of)
def test_shipped_files_keep_their_annotations(path):
    # Text instead of classes breaks the model's `config: DsxEncoderConfig`.
    assert not [names for _, module, names in imports_of(path) if module == "__future__" and "annotations" in names]


@pytest.mark.parametrize("path", SHIPPED, ids=name_of)
def test_shipped_files_end_with_their_public_names(path):
    last = tree_of(path).body[-1]
    assert isinstance(last, ast.Assign)
    assert last.targets[0].id == "__all__"


@pytest.mark.parametrize("path", [*SHIPPED, *HOME], ids=name_of)
def test_imports_run_one_way(path):
    for level, module, _ in imports_of(path):
        assert module.split(".")[0] not in ("scripts", "tests")
        assert level or module.split(".")[0] != PACKAGE.name, "inside the package: from .sibling import name"


def test_import_is_quiet_and_registers_the_auto_classes(tmp_path):
    code = """
import json
import modeling_dsx_encoder as package
import transformers
package.DsxEncoderConfig()
config = transformers.AutoConfig.for_model("dsx_encoder", hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
models = {name: getattr(transformers, name).from_config(config) for name in config.auto_map if name != "AutoConfig"}
with open("made.json", "w") as file:
    json.dump({name: [type(model).__name__, type(model).__module__] for name, model in models.items()}, file)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    made = json.loads((tmp_path / "made.json").read_text())
    expected = {
        name: [reference.split(".")[1], f"{PACKAGE.name}.{PACKAGE.name}"] for name, reference in AUTO_MAP.items()
    }
    expected.pop("AutoConfig")
    assert made == expected


# ------------------------------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize(
    ("path", "budget"),
    [*((path, 800) for path in SHIPPED), *((path, 300) for path in HOME), *((path, 60) for path in SCRIPTS)],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_files_keep_their_budget(path, budget):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= budget


@pytest.mark.parametrize("path", [*SHIPPED, *HOME, *SCRIPTS], ids=name_of)
def test_functions_keep_their_budget(path):
    functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert not {
        node.name: node.end_lineno - node.lineno + 1 for node in functions if node.end_lineno - node.lineno >= 60
    }


def test_file_names_say_something():
    names = {path.stem for path in project_files() if path.suffix == ".py"}
    assert not names & {"utils", "helpers", "common", "misc"}


@pytest.mark.parametrize("path", [*SHIPPED, *HOME, *SCRIPTS], ids=name_of)
def test_errors_are_value_or_type_errors(path):
    # ImportError: an extra that is not installed, named with its pip command.
    allowed = {"ValueError", "TypeError", "ImportError", "ModuleNotFoundError"}
    nodes = list(ast.walk(tree_of(path)))
    own = {
        node.name
        for node in nodes
        if isinstance(node, ast.ClassDef) and any(getattr(base, "id", None) in allowed for base in node.bases)
    }
    raised = {
        node.exc.func.id
        for node in nodes
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
    }
    assert raised <= allowed | own


# ------------------------------------------------------------------------------------------------------------- scripts


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_scripts_are_thin(path):
    tree = tree_of(path)
    assert re.search(r"scripts/" + path.name, ast.get_docstring(tree) or ""), "the docstring holds commands that run"
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert "main" in functions


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_scripts_explain_themselves(path, tmp_path):
    done = subprocess.run(
        [sys.executable, path, "--help"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "usage" in done.stdout
    assert not list(tmp_path.iterdir()), "asking for help writes nothing"


# ----------------------------------------------------------------------------------------------------------- packaging


def requirements():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = project["dependencies"] + [text for extra in project["optional-dependencies"].values() for text in extra]
    return [Requirement(text) for text in texts if not text.startswith(project["name"])]


def test_every_requirement_has_a_tested_version_at_or_above_its_floor():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.lower().replace("_", "-").split("==") for line in lines if line and not line.startswith("#"))
    for requirement in requirements():
        pin = pins[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(pin), f"{requirement} against the tested {pin}"


def test_everything_that_is_imported_is_required():
    required = {requirement.name.lower().replace("_", "-") for requirement in requirements()}
    names = {"sklearn": "scikit-learn", "yaml": "pyyaml"}
    for path in [*SHIPPED, *HOME, *SCRIPTS]:
        for level, module, _ in imports_of(path):
            top = module.split(".")[0]
            if level or top in sys.stdlib_module_names or top == PACKAGE.name:
                continue
            assert names.get(top, top).replace("_", "-") in required, f"{path.name} imports {top}"


def test_continuous_integration_runs_check_and_test():
    run = ROOT / ".ci" / "run"
    assert os.access(run, os.X_OK)
    assert "make check test" in run.read_text(encoding="utf-8")


def test_make_help_lists_the_targets():
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("demo", "test", "check", "fix", "clean"):
        assert re.search(rf"make {target}\b", done.stdout), f"{target} is missing"


def test_the_project_stands_alone():
    """No path of one machine, no folder beside the repository (tests may look for data there), no registry."""
    machine = re.compile(r"(?<![\w.~/}])/(?:home|root|work|mnt|Users)/[\w-]+")
    neighbour = re.compile(r"\.\./shared")
    registry = re.compile(r"--(?:extra-)?index-url|--find-links|pypi\.org|pythonhosted|download\.pytorch")
    for path in project_files():
        text = path.read_text(encoding="utf-8")
        assert not machine.search(text), path
        if path.parent.name != "tests":
            assert not neighbour.search(text), path
            assert not registry.search(text), path


# ------------------------------------------------------------------------------------------------------------- readmes


@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_readmes_name_every_part(readme):
    text = readme.read_text(encoding="utf-8")
    missing = [path.name for path in [*SHIPPED, *HOME, *SCRIPTS] if path.stem != "__init__" and path.stem not in text]
    assert not missing


@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_readmes_name_only_what_is_there(readme):
    text = readme.read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(re.findall(r"\bmake ([a-z-]+)", "\n".join(_code(text)))) <= set(targets)
    for named in re.findall(r"\b(?:scripts|configuration|tests)/[\w./-]+\.(?:py|yaml|json)\b", text):
        assert (ROOT / named).is_file(), named


def _code(text):
    """Return the commands of a README: its blocks and its `words`."""
    return re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL) + re.findall(r"`([^`\n]+)`", text)
