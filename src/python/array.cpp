#include "python/array.h"

#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>

namespace kdtree::python {

std::string text_of(nb::handle value) {
  const nb::object text = nb::steal(PyObject_Str(value.ptr()));
  // Lone surrogates have no UTF-8: show them escaped.
  const nb::object bytes =
      nb::steal(text.is_valid() ? PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace")
                                : nullptr);
  char *data = nullptr;
  Py_ssize_t size = 0;
  if (!bytes.is_valid() || PyBytes_AsStringAndSize(bytes.ptr(), &data, &size) != 0) {
    PyErr_Clear();
    return "(text that cannot be shown)";
  }
  return std::string(data, static_cast<size_t>(size));
}

namespace {

std::string type_text(nb::handle value) {
  nb::handle type = value.type();
  return text_of(type.attr("__module__")) + "." + text_of(type.attr("__qualname__"));
}

// Whether one of the classes that `type` derives from is `module`.`name`; imports nothing.
bool derives_from(nb::handle type, const char *module, const char *name) {
  const nb::object bases = nb::getattr(type, "__mro__", nb::none());
  if (!PyTuple_Check(bases.ptr())) return false;
  for (nb::handle base : bases)
    if (text_of(base.attr("__module__")) == module && text_of(base.attr("__name__")) == name)
      return true;
  return false;
}

}  // namespace

// What the binding knows of a type; asked once, and the type is kept alive with the answer.
struct Array::Kind {
  Library library = Library::dlpack;
  bool cupy = false;
  bool fake = false;  // torch's tensors without memory
  const dlpack::ExchangeApi *exchange = nullptr;
};

const Array::Kind &Array::kind_of(nb::handle value) {
  static std::unordered_map<PyObject *, Kind> known;              // under the GIL
  static const std::pair<PyObject *const, Kind> *last = nullptr;  // most calls have one type
  const nb::handle type = value.type();
  if (last != nullptr && last->first == type.ptr()) return last->second;
  const auto found = known.find(type.ptr());
  if (found != known.end()) return (last = &*found)->second;
  Kind kind;
  if (derives_from(type, "numpy", "ndarray")) kind.library = Library::numpy;
  if (derives_from(type, "torch", "Tensor")) kind.library = Library::torch;
  kind.fake = derives_from(type, "torch._subclasses.fake_tensor", "FakeTensor");
  kind.cupy = derives_from(type, "cupy", "ndarray");
  if (nb::hasattr(type, "__dlpack_c_exchange_api__")) {
    const nb::object capsule = type.attr("__dlpack_c_exchange_api__");
    auto api = static_cast<const dlpack::ExchangeApi *>(
        PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api == nullptr) PyErr_Clear();
    while (api != nullptr && api->version.major != 1) api = api->previous;
    kind.exchange = api;
  }
  type.inc_ref();
  return known.emplace(type.ptr(), kind).first->second;
}

namespace {

dlpack::DataType dlpack_dtype(int32_t dtype) {
  switch (dtype) {
    case KDTREE_I32: return {0, 32, 1};
    case KDTREE_I64: return {0, 64, 1};
    case KDTREE_F16: return {2, 16, 1};
    case KDTREE_BF16: return {4, 16, 1};
    case KDTREE_F32: return {2, 32, 1};
    case KDTREE_F8E4M3: return {10, 8, 1};
    case kBool: return {6, 8, 1};
  }
  return {1, 8, 1};
}

// The first line of the Python error that is set, which is cleared. What is nobody's mistake in an
// argument (KeyboardInterrupt, MemoryError) goes on instead.
std::string take_error() {
  nb::python_error error;
  if (!error.matches(PyExc_Exception) || error.matches(PyExc_MemoryError)) throw error;
  const std::string text = text_of(error.value());
  return text.substr(0, text.find('\n'));
}

// Whether tensor.name, or tensor.name(), is True. Asked of every tensor of every call, hence the
// interned names, and no bound method.
bool is_true(PyObject *answer) {
  if (answer == nullptr) throw nb::python_error();
  return nb::steal(answer).ptr() == Py_True;
}
bool attribute_is_true(nb::handle tensor, PyObject *name) {
  return is_true(PyObject_GetAttr(tensor.ptr(), name));
}
bool method_is_true(nb::handle tensor, PyObject *name) {
  PyObject *arguments[] = {nullptr, tensor.ptr()};
  return is_true(
      PyObject_VectorcallMethod(name, arguments + 1, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

int32_t dtype_of(dlpack::DataType t) {
  if (t.lanes != 1) return kOther;
  switch (t.code) {
    case 0: return t.bits == 32 ? int32_t(KDTREE_I32) : t.bits == 64 ? int32_t(KDTREE_I64) : kOther;
    case 1: return t.bits == 8 ? kUInt8 : kOther;
    case 2: return t.bits == 16 ? int32_t(KDTREE_F16) : t.bits == 32 ? int32_t(KDTREE_F32) : kOther;
    case 4: return t.bits == 16 ? int32_t(KDTREE_BF16) : kOther;
    case 6: return t.bits == 8 ? kBool : kOther;
    case 10: return t.bits == 8 ? int32_t(KDTREE_F8E4M3) : kOther;
  }
  return kOther;
}

std::string dlpack_dtype_text(dlpack::DataType t) {
  static const char *const names[] = {"int",    "uint",    "float", "handle",
                                      "bfloat", "complex", "bool"};
  std::string text = t.code < 7 ? names[t.code] : "dtype code " + std::to_string(t.code) + " of ";
  text += std::to_string(t.bits);
  if (t.lanes != 1) text += "x" + std::to_string(t.lanes);
  return text;
}

// value.name(), or an invalid object with the Python error set.
nb::object call_method(nb::handle value, const char *name) {
  const nb::object method = nb::steal(PyObject_GetAttrString(value.ptr(), name));
  return nb::steal(method.is_valid() ? PyObject_CallNoArgs(method.ptr()) : nullptr);
}

// The buffer protocol's format of one native number. NumPy marks one that is not aligned by `=`,
// and the library refuses its address.
int32_t dtype_of_format(const char *format) {
  if (format != nullptr && format[0] == '=' && format[1] != 'l') ++format;  // 4 bytes there
  const char code = format == nullptr || format[0] == '\0' || format[1] != '\0' ? 0 : format[0];
  switch (code) {
    case 'i': return KDTREE_I32;
    case 'l': return sizeof(long) == 8 ? KDTREE_I64 : KDTREE_I32;
    case 'q': return KDTREE_I64;
    case 'e': return KDTREE_F16;
    case 'f': return KDTREE_F32;
    case '?': return kBool;
    case 'B': return kUInt8;
  }
  return kOther;
}

}  // namespace

const char *dtype_text(int32_t dtype) {
  if (dtype == kBool) return "bool";
  if (dtype == kUInt8) return "uint8";
  const char *name = dtype_name(dtype);
  return name != nullptr ? name : "another dtype";
}

std::string shape_text(const int64_t *shape, int ndim) {
  std::string text = "[";
  for (int i = 0; i < ndim; ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

// ---- import

struct Array::BufferHolder {
  Py_buffer view{};
  ~BufferHolder() { PyBuffer_Release(&view); }  // nothing where the view was not filled
};

std::string Name::str() const {
  return index < 0 ? std::string(text) : text + ("[" + std::to_string(index) + "]");
}

Array::Array(Name name_, nb::handle value, nb::handle given, void *const *stream)
    : name(name_), object(nb::borrow(value)) {
  if (value.is_none()) throw TypeError(name + ": expected an array, got None");
  kind_ = &kind_of(value);
  library = kind_->library;
  const auto refuse_without_memory = [&] {
    throw TypeError(name + ": expected an array with memory, got a " + type_text(value) +
                    " without (a fake or meta tensor)");
  };
  if (kind_->fake) refuse_without_memory();
  if (library == Library::numpy) {
    from_numpy(value);
  } else if (!from_exchange_api(value)) {
    if (!nb::hasattr(value, "__dlpack__") || !nb::hasattr(value, "__dlpack_device__") ||
        PyType_Check(value.ptr()))
      throw TypeError(name + ": expected an array (NumPy, torch or any DLPack producer), got " +
                      type_text(value));
    from_dlpack(value, given, stream);
  }
  if (without_memory()) refuse_without_memory();
  if (library == Library::torch) {
    // What torch's export lets through although the memory is not the tensor. Asking costs more
    // than all the rest, and is_neg gives up the GIL, so that only dtypes that can be it are asked:
    // gradients are of floats, and negative views of the imaginary parts of complex numbers.
    static PyObject *const requires_grad = PyUnicode_InternFromString("requires_grad");
    static PyObject *const is_neg = PyUnicode_InternFromString("is_neg");
    static PyObject *const is_conj = PyUnicode_InternFromString("is_conj");
    const bool whole =
        dtype == KDTREE_I32 || dtype == KDTREE_I64 || dtype == kUInt8 || dtype == kBool;
    if (!whole && attribute_is_true(value, requires_grad))
      throw ValueError(name + ": expected a tensor without gradient, got requires_grad=True");
    const bool part = dtype == KDTREE_F16 || dtype == KDTREE_F32 || dtype == kOther;
    if ((part && method_is_true(value, is_neg)) ||
        (dtype == kOther && method_is_true(value, is_conj)))
      throw ValueError(name + ": expected plain memory, got a conjugate or negative view");
  }
  // An empty array may have no address; NULL would read as an argument left out.
  alignas(256) static char empty[256];
  if (data == nullptr) data = empty;
  // Strides of dimensions with one element mean nothing: make them dense.
  int64_t dense = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    if (shape[i] <= 1) strides[i] = dense;
    dense = strides[i] * (shape[i] > 0 ? shape[i] : 1);
  }
}

Array::Array(Array &&other) noexcept
    : name(other.name),
      data(other.data),
      ndim(other.ndim),
      dtype(other.dtype),
      dtype_text(std::move(other.dtype_text)),
      item_size(other.item_size),
      device_type(other.device_type),
      device_id(other.device_id),
      readonly(other.readonly),
      copied(other.copied),
      library(other.library),
      object(std::move(other.object)),
      kind_(other.kind_),
      buffer_(std::move(other.buffer_)),
      capsule_(std::move(other.capsule_)) {
  std::memcpy(shape, other.shape, sizeof(shape));
  std::memcpy(strides, other.strides, sizeof(strides));
}

Array::~Array() = default;

// A tensor of torch without memory has a NULL storage, so its address is its offset into that. No
// real allocation lies so low: for types not known as fake, the exact question is asked only there.
bool Array::without_memory() const {
  if (numel() == 0) return false;
  if (library != Library::torch || reinterpret_cast<uintptr_t>(data) >> 40 != 0)
    return data == nullptr;
  const int64_t offset = nb::cast<int64_t>(object.attr("storage_offset")());
  return reinterpret_cast<uintptr_t>(data) == static_cast<uintptr_t>(offset * item_size);
}

void Array::from_tensor(const dlpack::Tensor &tensor) {
  if (tensor.ndim > kMaxDims)
    throw ValueError(name + ": expected at most " + std::to_string(kMaxDims) + " dimensions, got " +
                     std::to_string(tensor.ndim));
  data = tensor.data == nullptr ? nullptr : static_cast<char *>(tensor.data) + tensor.byte_offset;
  ndim = tensor.ndim;
  int64_t dense = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    shape[i] = tensor.shape[i];
    strides[i] = tensor.strides != nullptr ? tensor.strides[i] : dense;
    dense *= shape[i];
  }
  dtype = dtype_of(tensor.dtype);
  if (dtype == kOther) dtype_text = dlpack_dtype_text(tensor.dtype);
  item_size = (tensor.dtype.bits * tensor.dtype.lanes + 7) / 8;
  device_type = tensor.device.type;
  device_id = tensor.device.id;
}

bool Array::from_exchange_api(nb::handle value) {
  const dlpack::ExchangeApi *api = kind_->exchange;
  if (api == nullptr || api->tensor_from_object == nullptr) return false;
  dlpack::Tensor tensor{};
  if (api->tensor_from_object(value.ptr(), &tensor) != 0)
    throw TypeError(name + ": expected an array that DLPack can export, got: " + take_error());
  from_tensor(tensor);
  return true;
}

void Array::from_numpy(nb::handle value) {
  buffer_ = std::make_unique<BufferHolder>();
  Py_buffer &view = buffer_->view;
  if (PyObject_GetBuffer(value.ptr(), &view, PyBUF_FULL_RO) == 0) {
    dtype = dtype_of_format(view.format);
    if (dtype == kOther) {
      dtype_text = text_of(value.attr("dtype"));
      if (nb::cast<bool>(nb::object(value.attr("dtype").attr("hasobject"))))
        throw TypeError(name + ": expected an array of numbers, got dtype " + dtype_text);
    }
  } else {
    // ml_dtypes' types and some of NumPy's are not in the buffer protocol: the same memory as bits.
    PyErr_Clear();
    const nb::object numpy_dtype = value.attr("dtype");
    dtype_text = text_of(numpy_dtype);
    dtype = dtype_text == "bfloat16"        ? int32_t(KDTREE_BF16)
            : dtype_text == "float8_e4m3fn" ? int32_t(KDTREE_F8E4M3)
                                            : kOther;
    const std::string bits = "V" + text_of(numpy_dtype.attr("itemsize"));
    const bool plain = !nb::cast<bool>(nb::object(numpy_dtype.attr("hasobject"))) && bits != "V0";
    const nb::object same = plain ? value.attr("view")(bits.c_str()) : nb::object();
    if (!plain || PyObject_GetBuffer(same.ptr(), &view, PyBUF_FULL_RO) != 0) {
      PyErr_Clear();
      throw TypeError(name + ": expected an array of numbers, got dtype " + dtype_text);
    }
  }
  if (view.ndim > kMaxDims)
    throw ValueError(name + ": expected at most " + std::to_string(kMaxDims) + " dimensions, got " +
                     std::to_string(view.ndim));
  data = view.buf;
  ndim = view.ndim;
  readonly = view.readonly != 0;
  item_size = view.itemsize;
  for (int i = 0; i < ndim; ++i) {
    shape[i] = view.shape[i];
    strides[i] = item_size > 0 ? view.strides[i] / item_size : 0;
    if (item_size > 0 && view.strides[i] % item_size != 0 && shape[i] > 1)
      throw ValueError(name + ": expected strides in whole elements, got " +
                       std::to_string(view.strides[i]) + " bytes in dimension " +
                       std::to_string(i));
  }
}

void Array::from_dlpack(nb::handle value, nb::handle given, void *const *stream) {
  const nb::object device = call_method(value, "__dlpack_device__");
  nb::object type, id;
  if (device.is_valid() && PyTuple_Check(device.ptr()) && nb::len(device) == 2) {
    type = nb::steal(PyNumber_Index(nb::object(device[0]).ptr()));
    id = nb::steal(PyNumber_Index(nb::object(device[1]).ptr()));
  }
  if (PyErr_Occurred() || !type.is_valid() || !nb::try_cast(type, device_type) ||
      !nb::try_cast(id, device_id))
    throw TypeError(name + ": expected (device type, id) from __dlpack_device__, got " +
                    (PyErr_Occurred() ? take_error() : text_of(device)));
  nb::dict options;
  if (on_cuda()) {
    // DLPack spells the legacy default stream 1.
    void *handle = stream != nullptr ? *stream : stream_of(given, *this);
    options["stream"] =
        nb::int_(handle == nullptr ? uintptr_t(1) : reinterpret_cast<uintptr_t>(handle));
  }
  nb::dict versioned;
  versioned.update(options);
  versioned["max_version"] = nb::make_tuple(1, 1);
  const auto export_with = [&](const nb::dict &keywords) {
    return nb::steal(PyObject_Call(nb::object(value.attr("__dlpack__")).ptr(),
                                   nb::make_tuple().ptr(), keywords.ptr()));
  };
  nb::object capsule = export_with(versioned);
  if (!capsule.is_valid() && PyErr_ExceptionMatches(PyExc_TypeError)) {
    PyErr_Clear();  // a producer from before DLPack 1.0
    capsule = export_with(options);
  }
  if (!capsule.is_valid())
    throw TypeError(name + ": expected an array that DLPack can export, got: " + take_error());
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    const auto managed = static_cast<dlpack::ManagedTensorVersioned *>(
        PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    if (managed->version.major != 1)
      throw TypeError(name + ": expected DLPack version 1, got " +
                      std::to_string(managed->version.major));
    readonly = (managed->flags & dlpack::kReadOnly) != 0;
    copied = (managed->flags & dlpack::kIsCopied) != 0;
    from_tensor(managed->tensor);
  } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    from_tensor(
        static_cast<dlpack::ManagedTensor *>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"))
            ->tensor);
  } else {
    throw TypeError(name + ": expected a DLPack capsule from __dlpack__, got " +
                    type_text(capsule));
  }
  capsule_ = std::move(capsule);  // left unconsumed: its destructor frees what it holds
}

// ---- checks

int64_t Array::numel() const {
  int64_t count = 1;
  for (int i = 0; i < ndim; ++i) count *= shape[i];
  return count;
}

const Array &Array::rank(int expected, const char *text) const {
  if (ndim != expected)
    throw ValueError(name + ": expected shape " + text + ", got " + shape_text(shape, ndim));
  return *this;
}

const Array &Array::dims(const Shape &expected, const char *text) const {
  if (!std::equal(shape, shape + ndim, expected.begin(), expected.end()))
    throw ValueError(name + ": expected shape " + text + " = " +
                     shape_text(expected.begin(), expected.size()) + ", got " +
                     shape_text(shape, ndim));
  return *this;
}

const Array &Array::dtypes(std::initializer_list<int32_t> allowed) const {
  if (std::find(allowed.begin(), allowed.end(), dtype) != allowed.end()) return *this;
  std::string names;
  for (int32_t one : allowed)
    names += (names.empty() ? "" : " or ") + std::string(python::dtype_text(one));
  throw TypeError(name + ": expected dtype " + names + ", got " +
                  (dtype == kOther ? dtype_text : std::string(python::dtype_text(dtype))));
}

const Array &Array::dense_innermost() const {
  if (ndim > 0 && shape[ndim - 1] > 1 && strides[ndim - 1] != 1 && numel() > 0)
    throw ValueError(name + ": expected a dense innermost dimension (stride 1), got stride " +
                     std::to_string(strides[ndim - 1]));
  return *this;
}

const Array &Array::same_device(const Array &other) const {
  const auto text = [](const Array &a) {
    if (a.on_cpu()) return std::string("cpu");
    if (a.on_cuda()) return "cuda:" + std::to_string(a.device_id);
    return "DLPack device type " + std::to_string(a.device_type);
  };
  if (!on_cuda() && !on_cpu())
    throw TypeError(name + ": expected CPU or CUDA memory, got " + text(*this));
  if (on_cpu() ? !other.on_cpu() : !other.on_cuda() || device_id != other.device_id)
    throw ValueError(name + ": expected the device of " + other.name.str() + " (" + text(other) +
                     "), got " + text(*this));
  return *this;
}

const Array &Array::writable() const {
  if (readonly) throw ValueError(name + ": expected a writable array, got a read-only one");
  if (copied)
    throw ValueError(name +
                     ": expected the caller's own memory, got a producer that exports copies");
  return *this;
}

const Array &Array::contiguous() const {
  int64_t dense = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    if (shape[i] > 1 && strides[i] != dense && numel() > 0)
      throw ValueError(name + ": expected a contiguous array, got strides " +
                       shape_text(strides, ndim) + " for shape " + shape_text(shape, ndim));
    dense *= shape[i];
  }
  return *this;
}

// ---- outputs

namespace {

// `with manager:`; one that is not there does nothing.
class With {
 public:
  explicit With(nb::object manager) : manager_(std::move(manager)) {
    if (manager_.is_valid()) manager_.attr("__enter__")();
  }
  ~With() {
    if (!manager_.is_valid()) return;
    try {
      manager_.attr("__exit__")(nb::none(), nb::none(), nb::none());
    } catch (nb::python_error &error) {
      error.discard_as_unraisable("kdtree");
    }
  }
  With(const With &) = delete;

 private:
  nb::object manager_;
};

// Makes `stream` the current one of the array's library, which takes memory from its pool then: it
// is free in the order of that stream, and goes back to it in that order.
nb::object with_stream(const Array &like, void *stream) {
  if (!like.on_cuda() || stream == stream_of(nb::none(), like)) return {};
  const auto handle = reinterpret_cast<uintptr_t>(stream);
  if (like.library == Library::torch) {
    const nb::object cuda = nb::module_::import_("torch").attr("cuda");
    return cuda.attr("stream")(cuda.attr("ExternalStream")(handle, like.object.attr("device")));
  }
  if (like.kind().cupy)
    return nb::module_::import_("cupy").attr("cuda").attr("ExternalStream")(handle, like.device_id);
  return {};
}

// Memory of the library's own behind a DLPack-speaking object. Who drops it last, and on which
// stream it was used until then, is not known, so its free waits for the device.
nb::object dlpack_array(const Array &like, const Shape &shape, int32_t dtype) {
  struct Owned {
    int32_t device_type, device_id;
    void *memory;
  };
  int64_t bytes = dtype == kBool ? 1 : dtype_size(dtype);
  for (int64_t size : shape) bytes *= size;
  auto owned = new Owned{like.on_cpu() ? 1 : 2, like.device_id, nullptr};
  nb::capsule owner(owned, [](void *p) noexcept {
    auto self = static_cast<Owned *>(p);
    {
      nb::gil_scoped_release release;  // what it waits for may need the GIL
      kdtree_free(self->device_type, self->device_id, self->memory, nullptr);
    }
    delete self;
  });
  int status;
  {
    nb::gil_scoped_release release;
    status = kdtree_malloc(owned->device_type, owned->device_id, bytes, nullptr, &owned->memory);
  }
  throw_status(status);
  const dlpack::DataType type = dlpack_dtype(dtype);
  size_t dims[kMaxDims];
  std::copy(shape.begin(), shape.end(), dims);
  return nb::cast(nb::ndarray<nb::array_api>(
      owned->memory, static_cast<size_t>(shape.size()), dims, owner, nullptr,
      nb::dlpack::dtype{type.code, type.bits, type.lanes}, owned->device_type, owned->device_id));
}

}  // namespace

Array allocate(const char *name, const Array &like, const Shape &shape, int32_t dtype,
               void *stream) {
  nb::list dims;
  for (int64_t size : shape) dims.append(size);
  const nb::tuple shape_tuple(dims);
  nb::object made;
  if (like.library == Library::torch) {
    const nb::object torch = nb::module_::import_("torch");
    nb::dict options;
    options["dtype"] = torch.attr(python::dtype_text(dtype));
    options["device"] = like.object.attr("device");
    const nb::object manager = with_stream(like, stream);
    {
      const With there(manager);
      made = torch.attr("empty")(shape_tuple, **options);
    }
    if (manager.is_valid())  // results are used on the current stream
      made.attr("record_stream")(torch.attr("cuda").attr("current_stream")(like.device_id));
  } else if (like.library == Library::numpy || like.kind().cupy) {
    // bfloat16 is ml_dtypes', and an input has brought it.
    const nb::object same_dtype = dtype == like.dtype
                                      ? nb::object(like.object.attr("dtype"))
                                      : nb::object(nb::str(python::dtype_text(dtype)));
    const nb::object library =
        nb::module_::import_(like.library == Library::numpy ? "numpy" : "cupy");
    const With device(like.on_cuda() ? library.attr("cuda").attr("Device")(like.device_id)
                                     : nb::object());
    const With there(with_stream(like, stream));
    made = library.attr("empty")(shape_tuple, same_dtype);
  } else {
    made = dlpack_array(like, shape, dtype);
  }
  return Array({name}, made, stream);
}

Workspace::Workspace(const Array &like, int64_t bytes, void *stream)
    : device_type_(like.device_type), device_id_(like.device_id), stream_(stream) {
  if (bytes == 0) return;
  if (like.library == Library::torch) {
    const nb::object torch = nb::module_::import_("torch");
    const With there(with_stream(like, stream));
    tensor_ = torch.attr("empty")(bytes, nb::arg("dtype") = torch.attr("uint8"),
                                  nb::arg("device") = like.object.attr("device"));
    data = PyLong_AsVoidPtr(nb::object(tensor_.attr("data_ptr")()).ptr());
    return;
  }
  if (stream_ == nullptr) stream_ = reinterpret_cast<void *>(1);  // cudaStreamLegacy
  throw_status(kdtree_malloc(device_type_, device_id_, bytes, stream_, &data));
}

Workspace::~Workspace() {
  if (data != nullptr && !tensor_.is_valid()) kdtree_free(device_type_, device_id_, data, stream_);
}

Array output(const char *name, nb::handle value, const Array &like, const Shape &shape,
             const char *shape_name, int32_t dtype, void *stream) {
  if (value.is_none()) return allocate(name, like, shape, dtype, stream);
  Array out({name}, value, stream);
  out.dtypes({dtype}).dims(shape, shape_name).same_device(like).writable().contiguous();
  return out;
}

void throw_status(int status) {
  if (status != KDTREE_OK) throw Error{static_cast<kdtree_status>(status), kdtree_last_error()};
}

void raise_in_python(const Error &error) {
  switch (error.status) {
    case KDTREE_ERROR_VALUE: return PyErr_SetString(PyExc_ValueError, error.message.c_str());
    case KDTREE_ERROR_TYPE: return PyErr_SetString(PyExc_TypeError, error.message.c_str());
    case KDTREE_ERROR_MEMORY: return PyErr_SetString(PyExc_MemoryError, error.message.c_str());
    default: return PyErr_SetString(PyExc_RuntimeError, error.message.c_str());
  }
}

// ---- streams

void *stream_of(nb::handle stream, const Array &like) {
  if (!stream.is_none()) {
    nb::object handle = nb::borrow(stream);
    if (nb::hasattr(stream, "cuda_stream")) {
      handle = stream.attr("cuda_stream");
    } else if (nb::hasattr(stream, "__cuda_stream__")) {
      // A method that returns (version, handle); early implementations made it a property.
      nb::object protocol = stream.attr("__cuda_stream__");
      if (PyCallable_Check(protocol.ptr())) protocol = call_method(stream, "__cuda_stream__");
      const bool pair =
          protocol.is_valid() && PyTuple_Check(protocol.ptr()) && nb::len(protocol) == 2;
      handle = pair ? nb::object(protocol[1]) : nb::none();
      PyErr_Clear();
    }
    if (PyBool_Check(handle.ptr()) || !PyLong_Check(handle.ptr()))
      throw TypeError(
          "stream: expected an int handle or an object with cuda_stream or __cuda_stream__, got " +
          type_text(stream));
    void *pointer = PyLong_AsVoidPtr(handle.ptr());
    if (pointer == nullptr && PyErr_Occurred())
      throw ValueError("stream: expected a cudaStream_t handle, got " + take_error());
    if (PyObject_RichCompareBool(handle.ptr(), nb::int_(0).ptr(), Py_LT) != 0)
      throw ValueError("stream: expected a cudaStream_t handle, got a negative number");
    return pointer;
  }
  if (!like.on_cuda()) return nullptr;
  const Array::Kind &kind = like.kind();
  const dlpack::ExchangeApi *api = kind.exchange;
  if (api != nullptr && api->current_stream != nullptr) {
    void *current = nullptr;
    if (api->current_stream(like.device_type, like.device_id, &current) != 0)
      throw nb::python_error();
    return current;
  }
  if (like.library == Library::torch) {
    const nb::object current =
        nb::module_::import_("torch").attr("cuda").attr("current_stream")(like.device_id);
    return PyLong_AsVoidPtr(nb::object(current.attr("cuda_stream")).ptr());
  }
  if (kind.cupy) {
    const nb::object current =
        nb::module_::import_("cupy").attr("cuda").attr("get_current_stream")(like.device_id);
    return PyLong_AsVoidPtr(nb::object(current.attr("ptr")).ptr());
  }
  return nullptr;  // the legacy default stream, which waits for all others
}

// ---- scalars

int64_t as_int(const char *name, nb::handle value) {
  if (!PyBool_Check(value.ptr()) && PyIndex_Check(value.ptr())) {
    nb::object number = nb::steal(PyNumber_Index(value.ptr()));
    if (number.is_valid()) {
      const long long result = PyLong_AsLongLong(number.ptr());
      if (!(result == -1 && PyErr_Occurred())) return result;
      PyErr_Clear();
      throw ValueError(std::string(name) + ": expected a 64-bit integer, got a larger one");
    }
    take_error();
  }
  throw TypeError(std::string(name) + ": expected an int, got " + type_text(value));
}

double as_float(const char *name, nb::handle value) {
  if (!PyBool_Check(value.ptr()) && !PyUnicode_Check(value.ptr())) {
    const double result = PyFloat_AsDouble(value.ptr());
    if (!(result == -1.0 && PyErr_Occurred())) return result;
    take_error();
  }
  throw TypeError(std::string(name) + ": expected a float, got " + type_text(value));
}

bool as_bool(const char *name, nb::handle value) {
  if (PyBool_Check(value.ptr())) return value.ptr() == Py_True;
  if (derives_from(value.type(), "numpy", "bool") || derives_from(value.type(), "numpy", "bool_"))
    return PyObject_IsTrue(value.ptr()) == 1;
  throw TypeError(std::string(name) + ": expected a bool, got " + type_text(value));
}

}  // namespace kdtree::python
