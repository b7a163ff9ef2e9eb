// Values as bytes and back, between processes of one program on one kind of machine: fields of
// fixed width, every list after its length. A structure is one list of its fields for both
// directions, beside it in its namespace:
//
//   template <class Both>
//   void fields(Both& both, Finding& f) { both(f.check, f.rank, f.ranks); }
//
// The reader is bounded: of bytes that are cut short or no such structure it throws Truncated, and
// it takes no more memory than they earn.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace shardproof {

struct Truncated {};

template <class T>
concept PlainBytes = std::is_trivially_copyable_v<T>;

class ByteWriter {
 public:
  template <class... T>
  void operator()(const T&... values) {
    (put(values), ...);
  }
  template <class T>
  void list(std::span<const T> values) {
    put(uint64_t(values.size()));
    if constexpr (PlainBytes<T>)
      raw(values.data(), values.size_bytes());
    else
      for (const T& v : values) put(v);
  }
  std::vector<std::byte> out;

 private:
  void raw(const void* p, size_t n) {
    const auto* b = static_cast<const std::byte*>(p);
    out.insert(out.end(), b, b + n);
  }
  template <PlainBytes T>
  void put(const T& v) {
    raw(&v, sizeof v);
  }
  template <class T>
  void put(const T& v) {
    fields(*this, const_cast<T&>(v));  // is only read
  }
  void put(const std::string& s) { list(std::span(s.data(), s.size())); }
  template <class T>
  void put(const std::vector<T>& values) {
    list(std::span<const T>(values));
  }
  template <class A, class B>
  void put(const std::pair<A, B>& v) {
    put(v.first), put(v.second);
  }
};

class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> in) : in_(in) {}
  template <class... T>
  void operator()(T&... values) {
    (get(values), ...);
  }
  bool at_end() const { return in_.empty(); }

 private:
  void raw(void* p, size_t n) {
    if (n > in_.size()) throw Truncated{};
    if (n > 0) std::memcpy(p, in_.data(), n);
    in_ = in_.subspan(n);
  }
  // Of a list whose entries take so many bytes at least.
  uint64_t length(size_t bytes_each) {
    uint64_t n = 0;
    raw(&n, sizeof n);
    if (n > in_.size() / bytes_each) throw Truncated{};
    return n;
  }
  template <PlainBytes T>
  void get(T& v) {
    raw(&v, sizeof v);
  }
  template <class T>
  void get(T& v) {
    fields(*this, v);
  }
  void get(std::string& s) {
    s.resize(length(1));
    raw(s.data(), s.size());
  }
  template <class T>
  void get(std::vector<T>& list) {
    list.clear();
    if constexpr (PlainBytes<T>) {
      list.resize(length(sizeof(T)));
      raw(list.data(), list.size() * sizeof(T));
    } else {
      for (uint64_t n = length(1); n > 0; --n) get(list.emplace_back());
    }
  }
  template <class A, class B>
  void get(std::pair<A, B>& v) {
    get(v.first), get(v.second);
  }
  std::span<const std::byte> in_;
};

}  // namespace shardproof
