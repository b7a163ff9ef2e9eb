// Files of tensors, by hand-made bytes: what is legal is read, each rule of the format that is
// broken is named with file and tensor.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "oracle/case.hpp"
#include "oracle/comm/door.hpp"
#include "oracle/tensors/npy.hpp"
#include "oracle/tensors/safetensors.hpp"

namespace shardproof::tensors {
namespace {

namespace fs = std::filesystem;

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto* p = reinterpret_cast<const std::byte*>(text.data());
  return {p, p + text.size()};
}

std::string file_text(const std::string& header, const std::string& data) {
  std::string text(8, '\0');
  for (int i = 0; i < 8; ++i) text[size_t(i)] = char(header.size() >> 8 * i & 0xff);
  return text + header + data;
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const BadInput& e) {
    return e.what();
  }
  return "accepted";
}
std::string refusal(const std::string& header, const std::string& data) {
  return refusal([&] {
    const auto file = bytes_of(file_text(header, data));
    Contents(file, "f");
  });
}

void expect_refused(const std::string& header, const std::string& data, const std::string& part) {
  const std::string said = refusal(header, data);
  EXPECT_EQ(said.substr(0, 3), "f: ") << said;
  EXPECT_NE(said.find(part), std::string::npos) << header << "\n  " << said;
  EXPECT_EQ(said.find('\n'), std::string::npos);
}

std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return fmt::format(R"({{"x":{{"dtype":"{}","shape":{},"data_offsets":{}}}}})", dtype, shape,
                     offsets);
}

// Bytes as the format's own documentation describes them, written out by hand: two f32 and one i64.
const std::string two =
    R"({"__metadata__":{"case":"ab"},"x":{"dtype":"F32","shape":[2],"data_offsets":[8,16]},)"
    R"("n":{"dtype":"I64","shape":[],"data_offsets":[0,8]}}  )";
const std::string two_data("\x02\0\0\0\0\0\0\0\0\0\x80\x3f\0\0\0\xc0", 16);

TEST(Safetensors, ReadsWhatTheFormatSays) {
  const auto file = bytes_of(file_text(two, two_data));
  const Contents c(file, "f");
  ASSERT_EQ(c.tensors().size(), 2u);
  EXPECT_EQ(c.tensors()[0].name, "n");  // by offset
  const FileTensor* x = c.find("x");
  ASSERT_TRUE(x);
  EXPECT_EQ(x->dtype, DType::f32);
  EXPECT_EQ(x->shape, std::vector<int64_t>{2});
  EXPECT_EQ(load(x->bytes.data(), DType::f32), 1.0);
  EXPECT_EQ(load(x->bytes.data() + 4, DType::f32), -2.0);
  EXPECT_EQ(load(c.find("n")->bytes.data(), DType::i64), 2.0);
  EXPECT_TRUE(c.find("n")->shape.empty());
  EXPECT_EQ(c.metadata(), (Metadata{{"case", "ab"}}));
  EXPECT_FALSE(c.find("y"));
}

TEST(Safetensors, ZeroSizeScalarsAndForeignDtypesAreLegal) {
  const std::string header = R"({"e":{"dtype":"F64","shape":[3,0],"data_offsets":[0,0]},)"
                             R"("u":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                             R"("z":{"dtype":"BF16","shape":[0],"data_offsets":[2,2]}})";
  const auto file = bytes_of(file_text(header, "ab"));
  const Contents c(file, "f");
  EXPECT_TRUE(c.find("e")->bytes.empty());
  EXPECT_FALSE(c.find("u")->dtype);
  EXPECT_EQ(c.find("u")->dtype_name, "U8");
  const auto nothing = bytes_of(file_text("{}", ""));
  EXPECT_TRUE(Contents(nothing, "f").tensors().empty());
}

TEST(Safetensors, BrokenRulesAreNamed) {
  const std::string eight(8, '\0');
  expect_refused(one("F32", "[2]", "[0,8]"), eight + "x", "expected 8 bytes of data");
  expect_refused(one("F32", "[2]", "[0,8]"), "1234567", "'x': expected data_offsets within");
  expect_refused(one("F32", "[2]", "[8,0]"), eight, "'x': expected data_offsets within");
  expect_refused(one("F32", "[3]", "[0,8]"), eight, "'x': expected 12 bytes for [3] of F32");
  expect_refused(one("F32", "[2]", "[4,12]"), eight + "1234", "without gaps");
  expect_refused(one("Q7", "[2]", "[0,8]"), eight, "'Q7'");
  expect_refused(one("F32", "[-2]", "[0,8]"), eight, "whole numbers from 0 on in shape");
  expect_refused(one("F32", "[2.0]", "[0,8]"), eight, "whole numbers from 0 on in shape");
  expect_refused(one("F32", "[[2]]", "[0,8]"), eight, "at most 3 objects");
  expect_refused(one("F32", "2", "[0,8]"), eight, "a list of whole numbers as shape");
  expect_refused(one("F32", "[2]", "[0,8,8]"), eight, "a first and a last byte");
  expect_refused(one("F32", "[2]", "[8]"), eight, "a first and a last byte");
  expect_refused(one("F32", "[4294967296,4294967296,4294967296]", "[0,8]"), eight,
                 "more than 2^63");
  expect_refused(one("F32", "[9223372036854775808]", "[0,8]"), eight, "whole numbers");
  expect_refused(R"({"x":{"dtype":"F32","shape":[2]}})", eight, "expected data_offsets, met none");
  expect_refused(R"({"x":{"shape":[2],"data_offsets":[0,8]}})", eight, "expected dtype, met none");
  expect_refused(R"({"x":{"dtype":"F32","data_offsets":[0,8]}})", eight,
                 "expected shape, met none");
  expect_refused(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":[]}})", eight,
                 "'more'");
  expect_refused(R"({"x":3})", "", "an object of dtype");
  expect_refused(R"({"x":[]})", "", "an object of dtype");
  expect_refused(R"({"__metadata__":{"k":1}})", "", "a text under");
  expect_refused(R"({"__metadata__":{"k":[1]}})", "", "a text under");
  expect_refused(
      R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"x":{"dtype":"F32","shape":[0],"data_offsets":[8,8]}})",
      eight, "met 'x' twice");
  expect_refused("[]", "", "begins with '{'");
  expect_refused(" {}", "", "begins with '{'");
  expect_refused("", "", "begins with '{'");
  expect_refused("{", "", "cut short");
}

TEST(Safetensors, OverlapsAreNamed) {
  const std::string header = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                             R"("b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})";
  expect_refused(header, std::string(12, '\0'), "'b': expected its first byte at 8");
  expect_refused(header, std::string(12, '\0'), "without overlaps");
}

TEST(Safetensors, LengthsThatTheFileDoesNotHold) {
  for (const std::string& text :
       {std::string(), std::string("1234567"), std::string("\xff\xff\xff\xff\xff\xff\xff\xff{}"),
        std::string("\x03\0\0\0\0\0\0\0{}", 10)}) {
    const auto file = bytes_of(text);
    const std::string said = refusal([&] { Contents(file, "f"); });
    EXPECT_EQ(said.substr(0, 11), "f: expected") << said;
  }
}

TEST(Safetensors, WrittenAndReadBack) {
  const std::string path = fs::temp_directory_path() / fmt::format("t{}.safetensors", getpid());
  Buffer half(DType::f16, {3}), wide(DType::f64, {2, 2}, Strides::transposed),
      none(DType::f32, {0, 4});
  fill_from(half.view(), std::vector<double>{1, -2, 0.5});
  fill_from(wide.view(), std::vector<double>{1, 2, 3, 4});
  write_safetensors(path,
                    {to_write("h \"\n\xc3\xa9", half.view()), to_write("none", none.view()),
                     to_write("w", wide.view())},
                    {{"case", "\"quoted\"\n"}});
  {
    const SafetensorsFile f(path);
    EXPECT_EQ(f->metadata().at("case"), "\"quoted\"\n");
    EXPECT_EQ(f->tensors()[0].name, "w");  // the widest first
    const FileTensor* h = f->find("h \"\n\xc3\xa9");
    ASSERT_TRUE(h);
    EXPECT_EQ(h->dtype, DType::f16);
    EXPECT_EQ(load(h->bytes.data() + 2, DType::f16), -2.0);
    EXPECT_EQ(load(f->find("w")->bytes.data() + 8, DType::f64), 2.0);  // row-major
    EXPECT_EQ(f->find("none")->shape, (std::vector<int64_t>{0, 4}));
    for (const FileTensor& t : f->tensors())
      EXPECT_EQ((t.bytes.data() - f.file().bytes().data()) % 2, 0);
  }
  EXPECT_THROW(write_safetensors(path, {to_write("x", half.view()), to_write("x", half.view())}),
               std::invalid_argument);
  EXPECT_THROW(write_safetensors("/nowhere/at/all", {}), Infrastructure);
  EXPECT_TRUE(SafetensorsFile(path)->find("w")) << "a refused write leaves the file alone";
  fs::remove(path);
  EXPECT_NE(refusal([&] { SafetensorsFile f(path); }).find("nothing there"), std::string::npos);
  EXPECT_NE(refusal([&] { SafetensorsFile f("/"); }).find("no regular file"), std::string::npos);
}

// ---- npy

std::string npy(int version, const std::string& dict, const std::string& data) {
  std::string text = std::string("\x93NUMPY") + char(version) + '\0';
  for (int i = 0; i < (version == 1 ? 2 : 4); ++i) text += char(dict.size() >> 8 * i & 0xff);
  return text + dict + data;
}
std::string npy_refusal(const std::string& text) {
  return refusal([&] {
    const auto file = bytes_of(text);
    npy_array(file, "f");
  });
}

TEST(Npy, ReadsThreeVersions) {
  const std::string data("\0\0\x80\x3f\0\0\0\xc0", 8);
  for (int version : {1, 2, 3}) {
    const auto file = bytes_of(
        npy(version, "{'descr': '<f4', 'fortran_order': True, 'shape': (2, 1), }   \n", data));
    const Array a = npy_array(file, "f");
    EXPECT_EQ(a.dtype, DType::f32);
    EXPECT_TRUE(a.fortran_order);
    EXPECT_EQ(a.shape, (std::vector<int64_t>{2, 1}));
    EXPECT_EQ(load(a.bytes.data() + 4, DType::f32), -2.0);
  }
  const auto scalar =
      bytes_of(npy(1, "{\"shape\":(),\"fortran_order\":False,\"descr\":\"|u1\"}", "x"));
  EXPECT_TRUE(npy_array(scalar, "f").shape.empty());
  EXPECT_FALSE(npy_array(scalar, "f").dtype);
  const auto empty = bytes_of(npy(1, "{'descr':'<f8','fortran_order':False,'shape':(0,)}", ""));
  EXPECT_TRUE(npy_array(empty, "f").bytes.empty());
}

TEST(Npy, WhatIsWrongIsNamed) {
  const auto dict = [](const std::string& descr, const std::string& shape) {
    return "{'descr': " + descr + ", 'fortran_order': False, 'shape': " + shape + "}";
  };
  const std::string four(4, '\0');
  for (const auto& [text, part] : std::vector<std::pair<std::string, std::string>>{
           {"", "\\x93NUMPY"},
           {"\x93NUMPY", "fewer than 10 bytes"},
           {npy(4, dict("'<f4'", "(1,)"), four), "version 1, 2 or 3"},
           {npy(1, dict("'<f4'", "(2,)"), four), "expected 8 bytes for [2]"},
           {npy(1, dict("'<f4'", "(1,)"), four + "x"), "met 5"},
           {npy(1, dict("'>f4'", "(1,)"), four), "little-endian"},
           {npy(1, dict("'|O'", "(1,)"), four), "no tensors"},
           {npy(1, dict("''", "(1,)"), four), "no tensors"},
           {npy(1, dict("[('a','<f4')]", "(1,)"), four), "a record of several"},
           {npy(1, dict("'<f4'", "(-1,)"), four), "an extent from 0"},
           {npy(1, dict("'<f4'", "(1 2)"), four), "',' or ')'"},
           {npy(1, dict("'<f8'", "(4611686018427387904,4)"), four), "more than 2^63"},
           {npy(1, "{'descr': '<f4'}", four), "met fewer"},
           {npy(1, "{'descr': '<f4', 'descr': '<f4'}", four), "once each"},
           {npy(1, "{'x': 1}", four), "'x'"},
           {npy(1, dict("'<f4'", "(1,)") + "x", four), "the header's end"},
           {npy(1, "{'descr': '<f4", four), "closing quote"},
           {std::string("\x93NUMPY\x01\0\xff\xff{}", 12), "cut short"},
           {std::string("\x93NUMPY\x02\0\xff\xff", 10), "cut short"}}) {
    const std::string said = npy_refusal(text);
    EXPECT_EQ(said.substr(0, 11), "f: expected") << said;
    EXPECT_NE(said.find(part), std::string::npos) << said;
  }
}

// ---- Files that others wrote, and files for others (suites/tests/interop)

// In the folder SHARDPROOF_INTEROP: NAME.npy and NAME.safetensors (tensor "x"), each holding 0, 1,
// 2 ... in row-major order; expected.txt says "NAME dtype 2,3 fortran" a line.
TEST(Interop, ReadsWhatPythonWrote) {
  const char* folder = std::getenv("SHARDPROOF_INTEROP");
  if (!folder) GTEST_SKIP() << "SHARDPROOF_INTEROP names no folder; ctest tensors.python does";
  std::ifstream expected(fs::path(folder) / "expected.txt");
  int files = 0;
  for (std::string name, dtype, shape, order; expected >> name >> dtype >> shape >> order;
       ++files) {
    const std::string path = fs::path(folder) / name;
    std::vector<int64_t> extents;
    std::istringstream list(shape == "-" ? "" : shape);
    for (std::string n; std::getline(list, n, ',');) extents.push_back(std::stoll(n));
    const bool numpy = name.ends_with(".npy");
    std::optional<NpyFile> npy;
    std::optional<SafetensorsFile> file;
    numpy ? void(npy.emplace(path)) : void(file.emplace(path));
    const FileTensor* x = numpy ? nullptr : (*file)->find("x");
    ASSERT_TRUE(numpy || x) << name;
    const auto met = numpy ? (*npy)->dtype : x->dtype;
    const std::span<const std::byte> bytes = numpy ? (*npy)->bytes : x->bytes;
    ASSERT_TRUE(met) << name;
    EXPECT_EQ(shardproof::name(*met), dtype) << name;
    EXPECT_EQ(numpy ? (*npy)->shape : x->shape, extents) << name;
    const bool columns_first = numpy && (*npy)->fortran_order;
    EXPECT_EQ(columns_first, order == "fortran") << name;
    const int64_t n = product(extents), rows = extents.size() == 2 ? extents[0] : 1,
                  columns = extents.size() == 2 ? extents[1] : n;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = columns_first ? i % columns * rows + i / columns : i;
      EXPECT_EQ(load(bytes.data() + size_t(at) * size_of(*met), *met), double(i))
          << name << " " << i;
    }
  }
  EXPECT_GT(files, 0);
}

TEST(Interop, WritesForPython) {
  const char* folder = std::getenv("SHARDPROOF_INTEROP");
  if (!folder) GTEST_SKIP() << "SHARDPROOF_INTEROP names no folder; ctest tensors.python does";
  std::vector<Buffer> buffers;
  std::vector<TensorToWrite> tensors;
  for (DType d : {DType::f16, DType::f32, DType::f64, DType::bf16, DType::i64, DType::i32}) {
    buffers.emplace_back(d, std::vector<int64_t>{2, 3});
    fill_from(buffers.back().view(), std::vector<double>{0, 1, 2, 3, 4, 5});
    tensors.push_back(to_write(shardproof::name(d), buffers.back().view()));
  }
  buffers.emplace_back(DType::f32, std::vector<int64_t>{0, 2});
  tensors.push_back(to_write("none", buffers.back().view()));
  write_safetensors(fs::path(folder) / "ours.safetensors", tensors,
                    {{"case", "caf\xc3\xa9 \"x\""}});
}

}  // namespace
}  // namespace shardproof::tensors
