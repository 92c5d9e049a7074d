#!/usr/bin/env bash
# Packs what serving_check needs on a GPU host that reaches no package registry, in two folders of under 64 MiB each: wheels for
# Python 3.12 and half of the model in OUT/1, the other half in OUT/2.
# Usage: tests/gpu/pack.sh MODEL.gguf OUT.  There, once all files lie in one folder DIR, in the root of the tree: . DIR/unpack.sh
set -euo pipefail
usage="usage: tests/gpu/pack.sh MODEL.gguf OUT"
model=${1:?$usage} out=${2:?$usage}
python=$(dirname "$0")/../../.venv/bin/python
rm -rf "$out"
mkdir -p "$out/1" "$out/2"

packages=(annotated-types googleapis-common-protos gguf grpcio grpcio-health-checking grpcio-reflection grpcio-status protobuf
  pydantic pydantic-core pydantic-settings python-dotenv structlog typing-inspection)
# The versions of this environment: `name==version` each.
"$python" - "${packages[@]}" > "$out/wanted.txt" <<'P'
import sys
from importlib.metadata import version

print("\n".join(f"{name}=={version(name)}" for name in sys.argv[1:]))
P
"$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform any -d "$out/1" -r "$out/wanted.txt"
rm "$out/wanted.txt"

xz -T0 -c "$model" > "$out/model.xz"
split -d -n 2 "$out/model.xz" "$out/model.xz."
mv "$out/model.xz.00" "$out/1/"
mv "$out/model.xz.01" "$out/2/"
rm "$out/model.xz"

cat > "$out/1/unpack.sh" <<'U'
# To be sourced. Leaves MODEL and PYTHONPATH set.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
site=$here/site
python3 -m pip install -q --no-index --no-deps --target "$site" "$here"/*.whl
# Services ask for the metadata of quire itself.
mkdir -p "$site/quire-0.1.0.dist-info"
printf 'Metadata-Version: 2.1\nName: quire\nVersion: 0.1.0\n' > "$site/quire-0.1.0.dist-info/METADATA"
cat "$here"/model.xz.0? | xz -dc > "$here/model.gguf"
export MODEL=$here/model.gguf PYTHONPATH=$site:$PWD QUIRE_COMPILER_MODEL_ROOTS=$here
U
du -sh "$out/1" "$out/2"
