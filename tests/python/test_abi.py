"""The prototypes and structs of the Python client are those of spillway.h."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from daemon_process import binary
from spillway_kv import _library, _native_step
from spillway_kv.lab.serving import prefer_library

HEADER = Path(__file__).resolve().parents[2] / "lib/spillway.h"

if not HEADER.exists():
    pytest.skip("no checkout here, only what a bundle has of it", allow_module_level=True)

# Python's structs by the header's names.
STRUCTS = {
    "spillway_sums": _library.Sums,
    "spillway_tensor": _native_step._Tensor,
    "spillway_step_tensors": _native_step.Tensors,
    "spillway_step_share": _native_step.Share,
    "spillway_step_shape": _native_step._Shape,
}
_SCALARS = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    "double": ctypes.c_double,
}
_POINTERS = (ctypes.c_void_p, ctypes.c_char_p)


def prototypes(text: str) -> dict[str, tuple[str, list[str]]]:
    """Returns the functions of a header: the result's type, and the types of the parameters."""
    bare = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    found = re.findall(r"SPILLWAY_EXPORT\s+([\w\s]+?[\s*]+)(spillway_\w+)\s*\(([^)]*)\)\s*;", bare)
    return {
        name: (
            result.strip(),
            []
            if parameters.strip() in ("", "void")
            else [_type_of(each) for each in parameters.split(",")],
        )
        for result, name, parameters in found
    }


def _type_of(parameter: str) -> str:
    """Returns the type of a parameter with a name: `const void* data` is `const void*`."""
    found = re.fullmatch(r"\s*(.*?[\s*])\w+(\[\])?\s*", parameter, flags=re.DOTALL)
    assert found is not None, parameter
    return " ".join(found[1].split()) + ("*" if found[2] else "")


def fits(c_type: str, python: Any) -> bool:
    """Whether a ctypes type stands for a C type."""
    if c_type.endswith("*"):
        return python in _POINTERS
    if c_type == "void":
        return python is None
    known = _SCALARS.get(c_type.removeprefix("const ")) or STRUCTS.get(c_type)
    return known is not None and python is known


def differences(declared: dict[str, tuple[str, list[str]]], library: Any) -> list[str]:
    """Returns how the functions that Python has described differ from the header's."""
    wrong = []
    for name, (result, parameters) in declared.items():
        function = vars(library).get(name)
        if function is None or function.argtypes is None:
            # Python does not use it.
            continue
        ours = function.argtypes
        if len(ours) != len(parameters):
            wrong.append(f"{name} has {len(parameters)} parameters, not {len(ours)}")
            continue
        wrong += [
            f"{name}: parameter {at} is {theirs}, not {mine.__name__}"
            for at, (theirs, mine) in enumerate(zip(parameters, ours, strict=True))
            if not fits(theirs, mine)
        ]
        if not fits(result, function.restype):
            wrong.append(f"{name} returns {result}, not {function.restype}")
    return wrong


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    prefer_library(binary())
    loaded = _library.library()
    assert loaded is not None
    return loaded


def test_functions(library: ctypes.CDLL) -> None:
    declared = prototypes(HEADER.read_text())
    described = {
        name
        for name, function in vars(library).items()
        if name.startswith("spillway_") and function.argtypes is not None
    }
    assert len(described) > 25
    assert described <= declared.keys()
    assert differences(declared, library) == []


def test_structs(tmp_path: Path) -> None:
    """The compiler tells sizes and offsets."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    asked = [f"sizeof({name})" for name in STRUCTS]
    asked += [f"offsetof({name}, {field})" for name, s in STRUCTS.items() for field in _fields(s)]
    asked += [
        f"sizeof((({name}*)0)->{field})" for name, s in STRUCTS.items() for field in _fields(s)
    ]
    body = "\n".join(f'printf("%zu\\n", {each});' for each in asked)
    source = tmp_path / "ask.c"
    source.write_text(
        f'#include <stddef.h>\n#include <stdio.h>\n#include "{HEADER}"\n'
        f"int main(void) {{\n{body}\nreturn 0;\n}}\n"
    )
    program = tmp_path / "ask"
    subprocess.run([compiler, "-Wall", "-Werror", "-o", program, source], check=True)
    answered = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    expected = [ctypes.sizeof(struct) for struct in STRUCTS.values()]
    fields = [getattr(s, field) for s in STRUCTS.values() for field in _fields(s)]
    expected += [field.offset for field in fields] + [field.size for field in fields]
    told = dict(zip(asked, map(int, answered.split()), strict=True))
    assert told == dict(zip(asked, expected, strict=True))
    # A struct of the same size may still have a field more or less.
    for name, struct in STRUCTS.items():
        assert _members(name) == _fields(struct)


def _fields(struct: Any) -> list[str]:
    return [name for name, *_ in struct._fields_]


def _members(name: str) -> list[str]:
    """Returns the members of a struct in the header."""
    bare = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    found = re.search(r"typedef struct \{([^}]*)\} " + name + ";", bare)
    assert found is not None, name
    return re.findall(r"(\w+);", found[1])


def test_differences_are_seen() -> None:
    """Another number of parameters, another type, and another result."""
    text = """
    /* SPILLWAY_EXPORT void spillway_hidden(int a); */
    SPILLWAY_EXPORT int spillway_one(spillway_step* step, int layer, const double* x,
                                     double seconds);
    SPILLWAY_EXPORT void spillway_two(void);
    SPILLWAY_EXPORT const char* spillway_three(const char* const names[], size_t count);
    """
    declared = prototypes(text)
    assert declared == {
        "spillway_one": ("int", ["spillway_step*", "int", "const double*", "double"]),
        "spillway_two": ("void", []),
        "spillway_three": ("const char*", ["const char* const*", "size_t"]),
    }

    class Function:
        def __init__(self, restype: Any, *argtypes: Any) -> None:
            self.restype, self.argtypes = restype, argtypes

    class Library:
        def __init__(self, **functions: Function) -> None:
            self.__dict__.update(functions)

    pointer = ctypes.c_void_p
    right = Library(
        spillway_one=Function(ctypes.c_int, pointer, ctypes.c_int, pointer, ctypes.c_double),
        spillway_two=Function(None),
        spillway_three=Function(ctypes.c_char_p, pointer, ctypes.c_size_t),
    )
    assert differences(declared, right) == []
    wrong = Library(
        spillway_one=Function(ctypes.c_int, pointer, ctypes.c_int64, pointer, ctypes.c_float),
        spillway_two=Function(ctypes.c_int),
        spillway_three=Function(ctypes.c_char_p, pointer),
    )
    assert differences(declared, wrong) == [
        "spillway_one: parameter 1 is int, not c_long",
        "spillway_one: parameter 3 is double, not c_float",
        f"spillway_two returns void, not {ctypes.c_int}",
        "spillway_three has 2 parameters, not 1",
    ]
