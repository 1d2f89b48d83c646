#!/bin/sh
# Compiles sample.bpf.c, with its parts below sample/, twice for each CPU: for current kernels, and for those from 5.8 on. The objects are committed, so that
# building nativeprof needs no clang; `build.sh --check` fails if they are not what this source gives (clang 14). The headers
# for the other CPU are those of Debian's linux-libc-dev-arm64-cross.
set -eu
cd "$(dirname "$0")"

# compile OBJECT FLAG...
compile() {
    out=$1
    shift
    ${CLANG:-clang} -target bpf -mcpu=v3 -O2 -g -Wall -Werror -fdebug-compilation-dir=. "$@" \
        -c sample.bpf.c -o "$out"
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
x86="-D__TARGET_ARCH_x86 -I/usr/include/x86_64-linux-gnu"
arm="-D__TARGET_ARCH_arm64 -I/usr/aarch64-linux-gnu/include"
# shellcheck disable=SC2086 # several words
{
    build sample.bpf.o $x86
    build sample-5.8.bpf.o $x86 -DLINUX_5_8
    build sample-aarch64.bpf.o $arm
    build sample-5.8-aarch64.bpf.o $arm -DLINUX_5_8
}
