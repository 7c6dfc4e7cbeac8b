"""Python files of a user's own, as modules."""

import importlib.util
import os
import sys
from hashlib import sha256
from pathlib import Path
from types import ModuleType

from tools.errors import UsageProblem


def module_at(path_text: str) -> ModuleType:
    """The file as a module, run anew. What it raises itself is raised. UsageProblem if there is no such file."""
    path = Path(path_text).resolve()
    name = f"plugin_{sha256(os.fsencode(path)).hexdigest()[:16]}"  # two files may have one name
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageProblem(f"there is no Python file {path_text}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
