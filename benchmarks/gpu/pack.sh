#!/usr/bin/env bash
# What a machine with a GPU needs beside torch and has no network to get, as two files that together are
# smaller than 64 MB: TVM for that machine's Python, and this project as an installed package.
#
#   bash benchmarks/gpu/pack.sh FOLDER [PYTHON_VERSION]     here; minutes
#   source FOLDER/unpack.sh [SITE]                          there, in the project's folder; seconds
#
# Compiled files are stripped; headers and sources of TVM are left out. Try it before it costs time of a GPU:
# packed for the Python at hand and unpacked into an empty folder, `python -m benchmarks.gpu.ready` says
# whether a graph is compiled there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder="$(mkdir -p "${1:?usage: pack.sh FOLDER [PYTHON_VERSION]}" && cd "$1" && pwd)"
python_version="${2:-3.12}"
python="${PYTHON:-python3}"
compiler=tvm/lib/libtvm_compiler.so
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir "$work/wheels" "$work/site"

platforms=()
for version in 2_17 2_24 2_27 2_28 2_34; do platforms+=(--platform "manylinux_${version}_x86_64"); done
"$python" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp "${platforms[@]}" \
  --python-version "$python_version" --constraint torch_pruner/constraints.txt --dest "$work/wheels" \
  apache-tvm apache-tvm-ffi platformdirs
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$work/wheels" .
for wheel in "$work"/wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$work/site"; done

cd "$work/site"
rm -rf torch_pruner tvm/3rdparty tvm/include tvm/src
rm -rf tvm_ffi/{3rdparty,include,src}  # cpp is imported, and the core is linked to libtvm_ffi_testing.so
find . -name '*.so' -exec strip --strip-unneeded {} +
mv "$compiler" "$work/compiler"
tar --create . | xz -9e > "$folder/site.tar.xz"
xz --x86 --lzma2=preset=9e,dict=256MiB --stdout "$work/compiler" > "$folder/compiler.xz"

cat > "$folder/unpack.sh" <<'UNPACK'
# Sourced in the project's folder: puts what pack.sh left out of the image on Python's path.
packed="$(dirname "${BASH_SOURCE[0]}")" site="${1:-/tmp/site}"
if [ ! -e "$site/unpacked" ]; then
  python3 - "$packed" "$site" <<'PYTHON' && touch "$site/unpacked"
import lzma, pathlib, shutil, sys, tarfile
packed, site = map(pathlib.Path, sys.argv[1:])
with tarfile.open(packed / "site.tar.xz") as archive:
    archive.extractall(site, filter="data")
with lzma.open(packed / "compiler.xz") as source:
    with open(site / "tvm/lib/libtvm_compiler.so", "wb") as target:
        shutil.copyfileobj(source, target, 1 << 24)
PYTHON
fi
export PYTHONPATH="$site:$PWD"
UNPACK
ls -l "$folder"
