#!/bin/sh
# Compiles sample.bpf.c. The object is committed, so that building nativeprof needs no clang;
# `build.sh --check` fails if the committed object is not what this source gives (clang 14).
set -eu
cd "$(dirname "$0")"
out=sample.bpf.o
[ "${1:-}" = --check ] && out=$(mktemp)
${CLANG:-clang} -target bpf -mcpu=v3 -O2 -g -Wall -Werror -fdebug-compilation-dir=. \
    -I/usr/include/"$(uname -m)"-linux-gnu -c sample.bpf.c -o "$out"
${STRIP:-llvm-strip} -g "$out"
if [ "${1:-}" = --check ]; then
    cmp "$out" sample.bpf.o || { echo "sample.bpf.o is stale: run src/capture/ebpf/build.sh" >&2; exit 1; }
    rm -f "$out"
fi
