#!/bin/sh
# Compiles sample.bpf.c twice: for current kernels, and for those from 5.8 on. The objects are committed, so that building
# nativeprof needs no clang; `build.sh --check` fails if they are not what this source gives (clang 14).
set -eu
cd "$(dirname "$0")"

# compile OBJECT FLAG...
compile() {
    out=$1
    shift
    ${CLANG:-clang} -target bpf -mcpu=v3 -O2 -g -Wall -Werror -fdebug-compilation-dir=. "$@" \
        -I/usr/include/"$(uname -m)"-linux-gnu -c sample.bpf.c -o "$out"
    ${STRIP:-llvm-strip} -g "$out"
}

# build OBJECT FLAG...
build() {
    object=$1
    shift
    if [ "$check" = no ]; then
        compile "$object" "$@"
        return
    fi
    fresh=$(mktemp)
    compile "$fresh" "$@"
    cmp "$fresh" "$object" || { echo "$object is stale: run src/capture/ebpf/build.sh" >&2; exit 1; }
    rm -f "$fresh"
}

check=no
[ "${1:-}" = --check ] && check=yes
build sample.bpf.o
build sample-5.8.bpf.o -DLINUX_5_8
