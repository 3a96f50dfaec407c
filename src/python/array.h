// Arrays as the binding sees them: NumPy by the buffer protocol, torch (and whoever else offers it)
// by DLPack's C exchange API, every other producer by __dlpack__. Nothing is ever copied.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <string>

#include "dtype.h"
#include "error.h"
#include "kdtree.h"
#include "python/dlpack.h"

namespace nb = nanobind;

namespace kdtree::python {

// Dtypes beyond kdtree_dtype that arrays of an op may have.
constexpr int32_t kBool = 100, kUInt8 = 101, kOther = 0;

// The library that an array came from, hence the one its results go to.
enum class Library { numpy, torch, dlpack };

constexpr int kMaxDims = 8;

// Of at most kMaxDims dimensions, without an allocation.
class Shape {
 public:
  Shape(std::initializer_list<int64_t> sizes) : Shape(sizes.begin(), sizes.end()) {}
  Shape(const int64_t *first, const int64_t *last) : count_(static_cast<int>(last - first)) {
    std::copy(first, last, sizes_);
  }
  void push_back(int64_t size) { sizes_[count_++] = size; }
  int size() const { return count_; }
  const int64_t *begin() const { return sizes_; }
  const int64_t *end() const { return sizes_ + count_; }

 private:
  int64_t sizes_[kMaxDims];
  int count_;
};

// How errors call an argument: text, or text[index] in a list. The text is a literal.
struct Name {
  const char *text;
  int64_t index = -1;
  std::string str() const;
};
inline std::string operator+(const Name &name, const std::string &rest) {
  return name.str() + rest;
}

// A view of one argument, alive as long as this object. Errors name the argument.
class Array {
 public:
  Name name;
  void *data = nullptr;
  int ndim = 0;
  int64_t shape[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};  // in elements; those of dimensions of size 1 are made dense
  int32_t dtype = kOther;
  std::string dtype_text;  // where dtype is kOther
  int64_t item_size = 0;
  int32_t device_type = 1, device_id = 0;
  bool readonly = false;
  bool copied = false;  // the producer exported a copy
  Library library = Library::numpy;
  nb::object object;  // the argument itself

  // The first array of a call, whose stream is `given`, the caller's, or where that is None, the
  // current one of the array's library; the others are told of the call's stream. Producers are
  // asked to make their data ready on it.
  Array(Name name, nb::handle value, nb::handle given) : Array(name, value, given, nullptr) {}
  Array(Name name, nb::handle value, void *stream) : Array(name, value, nb::handle(), &stream) {}
  Array(Array &&other) noexcept;
  Array(const Array &) = delete;
  ~Array();

  int64_t numel() const;
  bool on_cpu() const { return device_type == 1 || device_type == 3; }
  bool on_cuda() const { return device_type == 2 || device_type == 13; }

  // Checks; each returns the array, to chain.
  const Array &rank(int expected, const char *text) const;
  const Array &dims(const Shape &expected, const char *text) const;
  const Array &dtypes(std::initializer_list<int32_t> allowed) const;
  const Array &dense_innermost() const;
  const Array &same_device(const Array &other) const;
  // Writable memory of the caller, not a copy.
  const Array &writable() const;
  const Array &contiguous() const;

  template <class T>
  T *as() const {
    return static_cast<T *>(data);
  }

  struct Kind;
  const Kind &kind() const { return *kind_; }

 private:
  static const Kind &kind_of(nb::handle value);
  const Kind *kind_ = nullptr;

  // What keeps the view valid; exactly one is set.
  struct BufferHolder;
  std::unique_ptr<BufferHolder> buffer_;
  nb::object capsule_;

  Array(Name name, nb::handle value, nb::handle given, void *const *stream);
  bool without_memory() const;
  void from_tensor(const dlpack::Tensor &tensor);
  bool from_exchange_api(nb::handle value);
  void from_numpy(nb::handle value);
  void from_dlpack(nb::handle value, nb::handle given, void *const *stream);
};

std::string text_of(nb::handle value);  // str(value)
std::string shape_text(const int64_t *shape, int ndim);
const char *dtype_text(int32_t dtype);

// An output: the caller's array, checked, or a new one of `like`'s library and device when `value`
// is None. `name` is how an error calls it.
Array output(const char *name, nb::handle value, const Array &like, const Shape &shape,
             const char *shape_name, int32_t dtype, void *stream);
// An array of `like`'s library and device, for work on `stream` and what follows on the library's
// current one. Producers other than NumPy, torch and CuPy get one of nanobind's, which speaks
// DLPack.
Array allocate(const char *name, const Array &like, const Shape &shape, int32_t dtype,
               void *stream);

// Scratch memory for one call, given back in the order of its stream.
class Workspace {
 public:
  Workspace(const Array &like, int64_t bytes, void *stream);
  ~Workspace();
  Workspace(const Workspace &) = delete;
  void *data = nullptr;

 private:
  int32_t device_type_, device_id_;
  void *stream_;
  nb::object tensor_;
};

// Throws the Error of a failed call, with kdtree_last_error(); Python sees a ValueError, TypeError,
// MemoryError or RuntimeError.
void throw_status(int status);
void raise_in_python(const Error &error);

// The stream to launch on: the one given (an int handle, or an object with `cuda_stream` or
// `__cuda_stream__`), else the current one of the array's library. NULL for CPU arrays.
void *stream_of(nb::handle stream, const Array &like);

// Scalars, with errors that name them.
int64_t as_int(const char *name, nb::handle value);
double as_float(const char *name, nb::handle value);
bool as_bool(const char *name, nb::handle value);

}  // namespace kdtree::python
