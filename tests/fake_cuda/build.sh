#!/usr/bin/env bash
# build.sh PYTHON OUT: build the fake CUDA for the torch of that Python, as OUT/libcuda.so.1; OUT/run runs a command on it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd) python=$1 out=$2
site=$("$python" -c 'import pathlib, triton; print(pathlib.Path(triton.__file__).parents[1])')
mkdir -p "$out" && out=$(realpath "$out")
g++ -std=c++17 -O1 -fPIC -Wall -I"$site/triton/backends/nvidia/include" -c "$here/fake.cpp" -o "$out/fake.o"
nm --defined-only "$out/fake.o" | awk '{ print $NF }' | sort >"$out/defined"
# What else torch and Triton want of CUDA does nothing: it makes an empty handle, or says that it is not supported.
{
  nm -D --undefined-only "$site"/torch/lib/*.so 2>/dev/null | awk '{ print $NF }'
  grep -oE '\bcu[A-Z][A-Za-z0-9_]+' "$site/triton/backends/nvidia/driver.c"
} | sed 's/@.*//' | grep -E '^(__cuda|cu[A-Z]|cuda|cublas|cudnn|cufft|cupti|cusolver|cusparse|nccl)' | sort -u |
  comm -23 - "$out/defined" | awk '
    BEGIN { print "#include <stdlib.h>" }
    /^nccl(All|Gather|Scatter|Reduce|Send|Recv|Put|Signal|Wait|Comm(Grow|Init|Shrink|Split))/ { print "int " $0 "(void) { return 5; }"; next }
    /Graph|Capture|Ipc/ { print "int " $0 "(void) { return 801; }"; next }
    /Create/ { print "int " $0 "(void **made) { *made = calloc(1, 256); return 0; }"; next }
    { print "long " $0 "(void) { return 0; }" }' >"$out/stubs.c"
gcc -O1 -fPIC -fno-builtin -c "$out/stubs.c" -o "$out/stubs.o"
g++ -shared -Wl,-soname,libcuda.so.1 -o "$out/libcuda.so.1" "$out/fake.o" "$out/stubs.o" -ldl -lrt -lpthread
cat >"$out/run" <<END
#!/bin/sh
export LD_PRELOAD=$out/libcuda.so.1 TRITON_LIBCUDA_PATH=$out PYTHONPATH=$here/site-packages\${PYTHONPATH:+:\$PYTHONPATH}
exec "\$@"
END
chmod +x "$out/run"
