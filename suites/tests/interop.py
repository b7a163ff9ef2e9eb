"""Files of tensors between Python and Shardproof: interop.py TENSORS_TEST WORKDIR.

numpy writes npy files of each version; the public safetensors package, where it is installed, writes
and reads safetensors. Ends with 77 where neither is there.
"""
import importlib.util
import os
import shutil
import subprocess
import sys


def has(module):
    return importlib.util.find_spec(module) is not None


def write_npy(folder, expected):
    import numpy
    names = {"f64": "<f8", "f32": "<f4", "f16": "<f2", "i64": "<i8", "i32": "<i4"}
    for dtype, descr in names.items():
        for shape in [(), (5,), (2, 3), (0, 4)]:
            for version in [(1, 0), (2, 0), (3, 0)]:
                for order in ["C", "F"]:
                    count = int(numpy.prod(shape, dtype=int))
                    array = numpy.asarray(numpy.arange(count).reshape(shape), dtype=descr, order=order)
                    name = f"{dtype}_{len(shape)}_{count}_{version[0]}{order}.npy"
                    with open(os.path.join(folder, name), "wb") as file:
                        numpy.lib.format.write_array(file, array, version=version)
                    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
                    expected.append((name, dtype, shape, "fortran" if fortran else "rows"))


def write_safetensors(folder, expected):
    import numpy
    from safetensors.numpy import save_file
    for dtype, descr in {"f64": "<f8", "f32": "<f4", "f16": "<f2", "i64": "<i8", "i32": "<i4"}.items():
        name = f"{dtype}.safetensors"
        array = numpy.arange(6).astype(descr).reshape(2, 3)
        save_file({"a": array[:1].copy(), "x": array}, os.path.join(folder, name), metadata={"k": "v"})
        expected.append((name, dtype, (2, 3), "rows"))


def read_ours(path):
    from safetensors import safe_open
    with safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"case": 'caf\u00e9 "x"'}, file.metadata()
        names = set(file.keys())
        assert names == {"f16", "f32", "f64", "bf16", "i64", "i32", "none"}, names
        assert file.get_tensor("none").shape == (0, 2)
        for name in names - {"none", "bf16"}:  # numpy has no bf16
            assert file.get_tensor(name).tolist() == [[0, 1, 2], [3, 4, 5]], name


def main():
    if not has("numpy"):
        print("SKIPPED    numpy is not installed, so there is nothing to compare with")
        return 77
    program, folder = sys.argv[1:]
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    expected = []
    write_npy(folder, expected)
    if has("safetensors"):
        write_safetensors(folder, expected)
    with open(os.path.join(folder, "expected.txt"), "w") as file:
        for name, dtype, shape, order in expected:
            file.write(f"{name} {dtype} {','.join(map(str, shape)) or '-'} {order}\n")
    environment = {**os.environ, "SHARDPROOF_INTEROP": folder}
    code = subprocess.run([program, "--gtest_filter=Interop.*"], env=environment).returncode
    if code:
        return code
    if has("safetensors"):
        read_ours(os.path.join(folder, "ours.safetensors"))
    print(f"PASSED     {len(expected)} files of Python",
          "" if has("safetensors") else "; safetensors is not installed: its part was skipped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
