#!/bin/sh
# Runs the native core under the sanitizers: the doorbells in pure C under TSan, ASan and UBSan, then the
# extension, built apart with TSan, under three threads that use one pool, and with ASan and UBSan under tests/native.
# Nothing of the working tree is changed.
#
#     tests/native/sanitize.sh [python]        ROUNDS=5000 by default, for the pure C part
set -eu
cd "$(dirname "$0")/../.."
python=${1:-.venv/bin/python}
case $python in */*) python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") ;; esac
cc=${CC:-gcc}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
apart=

for sanitizer in thread address undefined; do
    echo "== doorbells, $sanitizer sanitizer"
    $cc -std=c11 -O1 -g -Wall -Wextra -Werror -pthread -fsanitize=$sanitizer -fno-sanitize-recover=all \
        -Isrc/shoal/native tests/native/stress.c -o "$work/stress_$sanitizer"
    run="$work/stress_$sanitizer"
    # TSan of older compilers cannot place its shadow where the kernel randomizes addresses widely.
    if [ $sanitizer = thread ] && ! "$run" 1 >"$work/probe" 2>&1 && grep -q "unexpected memory mapping" "$work/probe"
    then apart="setarch -R"; run="$apart $run"; fi
    $run "${ROUNDS:-5000}"
done

build() { # build(folder, sanitizers): a copy of the package, with the extension built so
    mkdir "$1"
    cp -r src/shoal "$1/shoal"
    find "$1" -name '*.so' -delete
    SHOAL_CFLAGS="-O1 -g -fno-omit-frame-pointer -fsanitize=$2 -fno-sanitize-recover=all" CC=$cc \
        "$python" setup.py -q build_ext --force --build-lib "$1" --build-temp "$1.temp"
    ls "$1"/shoal/native/_core*.so >/dev/null # the extension is optional to setup.py, not here
}
cat >"$work/check.py" <<'CHECK'
import sys
import shoal.native
assert shoal.native.KIND == "native" and shoal.native.core.__file__.startswith(sys.argv[1]), shoal.native.core
print("runs", shoal.native.core.__file__)
CHECK

echo "== extension, thread sanitizer"
build "$work/threads" thread
tsan=$($cc -print-file-name=libtsan.so)
export PYTHONPATH="$work/threads"
$apart env LD_PRELOAD="$tsan" "$python" "$work/check.py" "$work/threads"
$apart env LD_PRELOAD="$tsan" TSAN_OPTIONS=exitcode=66 "$python" tests/native/crowd.py "${SECONDS_EACH:-5}"

echo "== extension, address and undefined sanitizers"
build "$work/lib" address,undefined
# libstdc++ too: ASan must find the C++ throw at its start, or an exception in another extension ends the program.
LD_PRELOAD="$($cc -print-file-name=libasan.so) $($cc -print-file-name=libstdc++.so)"
export PYTHONPATH="$work/lib" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc
LD_PRELOAD=$LD_PRELOAD "$python" "$work/check.py" "$work/lib"
LD_PRELOAD=$LD_PRELOAD "$python" -m pytest tests/native -q -p no:cacheprovider --capture=no # reports go to stderr
echo "== clean"
