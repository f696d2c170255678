"""Compares the machine code of CUDA kernels before and after an edit, without a GPU.

    python tests/gpu/disassembly.py read ffi ffi/cuda/row_norm/forward.cu --save before.json
    python tests/gpu/disassembly.py compare before.json after.json

`read` compiles each file with the options of CMakeLists.txt. A compiled .cubin is also accepted.
`compare` prints each kernel whose instructions differ, with its registers, its instructions and its
accesses to spilled registers. Names of kernels do not count: kernels are matched by their code
first, and the rest by their names. The places of kernel parameters do not count either.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import importlib.util
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Where an instruction of 128 bits has its opcode, and the offset of an operand in constant memory.
# These facts about sm_80 to sm_90 are not documented. If one is wrong, equal code looks different.
OPCODE = 0xFFF
CONSTANT_FORMS = (3, 5)  # bits 9 to 11: an operand is in constant memory, where parameters are
CONSTANT_LOADS = (0xB82, 0xAB9)  # LDC and ULDC
CONSTANT_OFFSET = ((1 << 16) - 1) << 38
REGISTER_COUNT = 0x2F  # an attribute of .nv.info
SPILLS = (0x983, 0x387)  # LDL and STL: local memory


def compiled(source: Path, include: Path, architecture: str, folder: str) -> Path:
    """Compiles a file as CMakeLists.txt does."""
    if source.suffix == ".cubin":
        return source
    jaxlib = importlib.util.find_spec("jaxlib")
    assert jaxlib is not None and jaxlib.submodule_search_locations is not None
    headers = Path(jaxlib.submodule_search_locations[0]) / "include"
    result = Path(folder) / f"{source.stem}.cubin"
    options = ["-std=c++20", f"-arch=sm_{architecture}", "-O3", "-DNDEBUG"]
    options += ["--expt-relaxed-constexpr", f"-I{include}", "-isystem", str(headers)]
    subprocess.run(["nvcc", "-cubin", *options, "-o", str(result), str(source)], check=True)
    return result


def sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """The name and the content of each section of an ELF file of 64 bits."""
    offset = struct.unpack_from("<Q", cubin, 40)[0]
    size, count, names = struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, offset + i * size) for i in range(count)]
    strings = headers[names][4]
    for name, kind, _, _, start, length, *_ in headers:
        end = cubin.index(b"\0", strings + name)
        content = b"" if kind == 8 else cubin[start : start + length]  # 8: without content
        yield cubin[strings + name : end].decode(), content or bytes(length)


def kernels(cubin: Path) -> list[dict[str, Any]]:
    """A dict for each kernel of a compiled file."""
    shared: dict[str, int] = {}
    code: dict[str, bytes] = {}
    registers: dict[str, int] = {}
    found_sections = dict(sections(cubin.read_bytes()))
    for section, content in found_sections.items():
        kind, _, name = section.removeprefix(".nv").partition(".")[2].partition(".")
        if kind == "text":
            code[name] = content
        elif kind == "shared":
            shared[name] = len(content)
    symbols = [s[0] for s in struct.iter_unpack("<IBBHQQ", found_sections[".symtab"])]
    strings = found_sections[".strtab"]
    for symbol, count in register_counts(found_sections[".nv.info"]):
        start = symbols[symbol]
        registers[strings[start : strings.index(b"\0", start)].decode()] = count
    filtered = subprocess.run(
        ["c++filt"], input="\n".join(code), check=True, capture_output=True, text=True
    ).stdout.split("\n")
    found = []
    for (name, content), demangled in zip(code.items(), filtered, strict=False):
        body = list(struct.iter_unpack("<QQ", content))
        opcodes = [first & OPCODE for first, _ in body]
        found.append(
            {
                "name": shortened(demangled),
                "registers": registers[name],
                "shared": shared.get(name, 0),
                "instructions": len(body),
                "spills": sum(opcode in SPILLS for opcode in opcodes),
                "opcodes": hashlib.sha256(str(sorted(opcodes)).encode()).hexdigest(),
                "code": hashlib.sha256(b"".join(map(without_offset, body))).hexdigest(),
            }
        )
    return found


def register_counts(info: bytes) -> Iterator[tuple[int, int]]:
    """The symbol and the number of registers of each kernel, from the section .nv.info."""
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if attribute == REGISTER_COUNT:
            yield struct.unpack_from("<II", info, at + 4)  # type: ignore[misc]
        at += 4 + (size if form == 4 else 0)


def without_offset(instruction: tuple[int, int]) -> bytes:
    """An instruction without its operand's place in constant memory."""
    first, second = instruction
    if first >> 9 & 7 in CONSTANT_FORMS or first & OPCODE in CONSTANT_LOADS:
        first &= ~CONSTANT_OFFSET
    return struct.pack("<QQ", first, second)


def shortened(name: str) -> str:
    """A demangled name without namespaces, arguments of the function and types of enumerators."""
    name = re.sub(r"\(anonymous namespace\)::|gradops::|^void ", "", name)
    return re.sub(r"\(\w+\)(?=\d)", "", name).partition("(")[0]


def read(arguments: argparse.Namespace) -> int:
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for source in arguments.sources:
            found += kernels(compiled(source, arguments.include, arguments.arch, folder))
    arguments.save.write_text(json.dumps(found, indent=1))
    print(f"{len(found)} kernels, {sum(k['instructions'] for k in found)} instructions")
    return 0


def compare(arguments: argparse.Namespace) -> int:
    """Returns 0 if all kernels have equal code."""
    old, new = (json.loads(path.read_text()) for path in (arguments.before, arguments.after))
    alike = ("code", "registers", "shared")
    left = collections.Counter(tuple(k[a] for a in alike) for k in old)
    changed = []
    for kernel in new:
        key = tuple(kernel[a] for a in alike)
        if left[key] > 0:
            left[key] -= 1
        else:
            changed.append(kernel)
    gone = []
    for kernel in old:
        key = tuple(kernel[a] for a in alike)
        if left[key] > 0:
            left[key] -= 1
            gone.append(kernel)
    for title, found in (("before", old), ("after", new)):
        total = sum(k["instructions"] for k in found)
        print(f"{title}: {len(found)} kernels, {total} instructions, {16 * total} bytes")
    by_name = {k["name"]: k for k in gone}
    pairs = [(by_name.pop(k["name"], None), k) for k in sorted(changed, key=lambda k: k["name"])]
    alike = ("opcodes", "registers", "shared", "spills")
    different = [
        (was, kernel)
        for was, kernel in pairs
        if was is None or any(was[a] != kernel[a] for a in alike)
    ]
    print(f"equal code: {len(new) - len(changed)} kernels")
    print(f"equal numbers of each opcode: {len(changed) - len(different)} more")
    print(f"different: {len(different)}")
    for was, kernel in different:
        print(kernel["name"])
        for number in ("registers", "instructions", "spills", "shared"):
            before = was[number] if was else "-"
            if before != kernel[number] or number in ("registers", "instructions"):
                print(f"    {number}: {before} -> {kernel[number]}")
    for name in by_name:
        print(f"only before: {name}, {by_name[name]['instructions']} instructions")
    return 1 if changed or by_name else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    commands = parser.add_subparsers(required=True)
    reading = commands.add_parser("read", help="compile files and save what their kernels are like")
    reading.add_argument("include", type=Path, help="the folder ffi of the source tree")
    reading.add_argument("sources", type=Path, nargs="+")
    reading.add_argument("--arch", default="90")
    reading.add_argument("--save", type=Path, required=True)
    reading.set_defaults(run=read)
    comparing = commands.add_parser("compare", help="compare two saved files")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.set_defaults(run=compare)
    arguments = parser.parse_args()
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
