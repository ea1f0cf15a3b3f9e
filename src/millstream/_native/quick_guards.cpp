// What is checked in every call of a captured step, without Python's 50 to 70 ns for each property of each tensor.
//
// Contract
// - `hold` gives 1 only if every entry holds the object it held (or an equal plain value), every container as many items
//   or the same keys in the same order, every object its class, every function its code, and every tensor its memory,
//   layout, gradient and demand for one. 0 means no more than: let Python look; 2, but not at what is borrowed.
// - The caller keeps alive what is added here, so that Python's collector can see through it.
// - Where Python tells which dicts change (3.12 and later), dicts are looked into only when one of them has changed.
// - Borrowed entries are those of modules and classes that hardly ever change, hundreds of them in some dozen dicts. They
//   have a count of their own; before 3.12 each dict has a version, which is compared.

#include <Python.h>

#include <cmath>
#include <cstdint>
#include <exception>
#include <utility>
#include <vector>

#include <ATen/core/TensorBase.h>

#include "tensors.h"

namespace {

constexpr uint64_t kNever = UINT64_MAX;
uint64_t num_changes = 0;           // in any dict that Python tells of
uint64_t num_borrowed_changes = 0;  // likewise, in dicts with borrowed entries

// Python 3.13.0 says nothing of an attribute that lies within its object (python/cpython#125608).
constexpr bool kHearsOfObjects = PY_VERSION_HEX < 0x030D0000 || PY_VERSION_HEX >= 0x030D0100;

#if PY_VERSION_HEX >= 0x030C0000

template <uint64_t& count>
int count_change(PyDict_WatchEvent, PyObject*, PyObject*, PyObject*) {
  ++count;
  return 0;
}

// A dict is never let go of again: to hear of it in vain costs a look into the others.
template <uint64_t& count>
bool hear_of(PyObject* dict) {
  static const int listener = PyDict_AddWatcher(count_change<count>);  // of which there are no more than eight
  if (listener >= 0 && PyDict_Watch(listener, dict) == 0) return true;
  PyErr_Clear();
  return false;
}

uint64_t version_of(PyObject*) { return kNever; }

#else

template <uint64_t& count>
bool hear_of(PyObject*) {
  return false;
}

uint64_t version_of(PyObject* dict) { return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag; }

#endif

struct Entry {
  PyObject* holder;  // dict, list, closure cell or another mapping
  PyObject* key;
  PyObject* value;  // null: there must be none
};

struct Watched {
  Place place;
  const Implementation* tensor;
  const void* address;
  const Implementation* gradient;
  bool requires_grad;
  size_t layout;         // where its dimensions, sizes and strides begin among those of all
  const char* storage;   // where these are looked up: to be fetched ahead, not to be read
  const char* autograd;  // likewise; null without
};

// A kernel or two later the processor's caches have forgotten hundreds of tensors. Each is some five lines in four places,
// that lead to each other; asked for ahead they come side by side instead of one after the other.
constexpr size_t kAhead = 12;
constexpr size_t kLine = 64;

void fetch(const Watched& watched) {
  const char* tensor = reinterpret_cast<const char*>(watched.tensor);
  __builtin_prefetch(watched.place);
  __builtin_prefetch(tensor);
  __builtin_prefetch(tensor + sizeof(Implementation) - 1);
  __builtin_prefetch(watched.storage);
  if (watched.autograd == nullptr) return;
  for (size_t line = 0; line < 3; ++line) __builtin_prefetch(watched.autograd + line * kLine);
}

struct Written {
  Place place;
  const void* version;  // where it is counted, when last seen: to be fetched ahead, not to be read
};

using Length = std::pair<PyObject*, Py_ssize_t>;

// A dict, and its keys as a list.
using Order = std::pair<PyObject*, PyObject*>;

struct Pin {
  PyObject* owner;
  bool is_class;
  PyObject* value;
};

// What a function is made of: hundreds are looked at, one cache line each.
struct Function {
  PyFunctionObject* owner;
  PyObject *code, *defaults, *keyword_defaults;

  bool holds() const {
    return (owner->func_code == code) & (owner->func_defaults == defaults) & (owner->func_kwdefaults == keyword_defaults);
  }
};

// What is in dicts, or in something else.
struct Contents {
  bool hold() const;

  std::vector<Entry> entries;
  std::vector<Length> lengths;
  std::vector<Order> orders;
};

// Entries of dicts that hardly ever change.
struct Borrowed {
  struct Dict {
    PyObject* dict;
    uint64_t version;  // when its entries were last found to hold
    std::vector<Entry> entries;
  };

  bool hold();
  void add(const Entry& entry);

  std::vector<Dict> dicts;
  bool hears = true;
  uint64_t held_at = kNever;
};

struct Guards {
  // Each of these gives false for what it cannot watch.
  bool add_entry(PyObject* holder, PyObject* key, PyObject* value);
  bool add_borrowed(PyObject* holder, PyObject* key, PyObject* value);
  bool add_pin(PyObject* owner, bool is_class, PyObject* value);
  bool add_function(PyObject* owner, PyObject* code, PyObject* defaults, PyObject* keyword_defaults);
  bool add_tensor(PyObject* tensor, PyObject* gradient);
  bool add_written(PyObject* tensor);

  // Where a holder's contents are looked at. A module's names change in each step of a loop that stands in a script.
  Contents& contents_of(PyObject* holder) {
    if (!PyDict_Check(holder) || PyDict_GetItemString(holder, "__builtins__") != nullptr) return others;
    hears = kHearsOfObjects && hear_of<num_changes>(holder) && hears;
    return dicts;
  }

  size_t offset;  // of the pointer to the implementation in a Python tensor, in bytes
  Contents dicts, others;
  Borrowed borrowed;
  bool hears = true;         // whether Python tells of changes in all of these dicts
  uint64_t held_at = kNever;  // the number of changes when the dicts were last found to hold
  std::vector<Pin> pins;
  std::vector<Function> functions;
  std::vector<Watched> watched;
  std::vector<int64_t> layouts;
  std::vector<Written> written;
};

// A class's attributes and those in slots.
PyObject* look_up_in_mapping(const Entry& entry) {
  PyObject* now = PyObject_GetItem(entry.holder, entry.key);
  if (now != nullptr) Py_DECREF(now);  // the owner holds it
  if (now == nullptr && PyErr_ExceptionMatches(PyExc_KeyError)) PyErr_Clear();
  return now;
}

PyObject* look_up(const Entry& entry) {
  if (PyDict_Check(entry.holder)) return PyDict_GetItemWithError(entry.holder, entry.key);
  if (PyCell_Check(entry.holder)) return PyCell_GET(entry.holder);
  if (!PyList_Check(entry.holder)) return look_up_in_mapping(entry);
  Py_ssize_t index = PyLong_AsSsize_t(entry.key);
  return index >= 0 && index < PyList_GET_SIZE(entry.holder) ? PyList_GET_ITEM(entry.holder, index) : nullptr;
}

bool holds(const Entry& entry) {
  PyObject* now = look_up(entry);
  if (now == entry.value) return true;
  if (now == nullptr || entry.value == nullptr || Py_TYPE(now) != Py_TYPE(entry.value)) return false;
  if (PyFloat_CheckExact(now)) {
    double one = PyFloat_AS_DOUBLE(now), other = PyFloat_AS_DOUBLE(entry.value);
    if (std::isnan(one)) return std::isnan(other);                        // which is not equal to itself
    return one == other && std::signbit(one) == std::signbit(other);  // zeros of either sign are equal
  }
  bool is_plain = PyLong_CheckExact(now) || PyUnicode_CheckExact(now);
  return is_plain && PyObject_RichCompareBool(now, entry.value, Py_EQ) == 1;
}

bool has_layout(const Implementation& tensor, const int64_t* layout) {
  if (tensor.dim() != *layout++) return false;
  for (int64_t size : tensor.sizes()) {
    if (size != *layout++) return false;
  }
  for (int64_t stride : tensor.strides()) {
    if (stride != *layout++) return false;
  }
  return true;
}

bool holds(const Watched& watched, const std::vector<int64_t>& layouts) {
  const Implementation* tensor = *watched.place;
  if (tensor != watched.tensor || tensor->data() != watched.address) return false;
  if (tensor->requires_grad() != watched.requires_grad) return false;
  if (!has_layout(*tensor, layouts.data() + watched.layout)) return false;
  // at::Tensor, whose headers take ten times as long to compile, adds no member to its only base.
  const auto& gradient = reinterpret_cast<const at::TensorBase&>(tensor->grad());
  return (gradient.defined() ? gradient.unsafeGetTensorImpl() : nullptr) == watched.gradient;
}

bool has_order(PyObject* dict, PyObject* keys) {
  if (PyDict_Size(dict) != PyTuple_GET_SIZE(keys)) return false;
  PyObject *key, *value;
  Py_ssize_t position = 0;
  for (Py_ssize_t i = 0; PyDict_Next(dict, &position, &key, &value); ++i) {
    if (key != PyTuple_GET_ITEM(keys, i)) return false;
  }
  return true;
}

bool holds(const Pin& pin) {
  if (pin.is_class) return reinterpret_cast<PyTypeObject*>(pin.owner)->tp_mro == pin.value;
  return reinterpret_cast<PyObject*>(Py_TYPE(pin.owner)) == pin.value;
}

bool Contents::hold() const {
  for (const Entry& entry : entries) {
    if (!holds(entry)) return false;
  }
  for (const auto& [container, length] : lengths) {
    if (PyObject_Size(container) != length) return false;
  }
  for (const auto& [dict, keys] : orders) {
    if (!has_order(dict, keys)) return false;
  }
  return true;
}

void Borrowed::add(const Entry& entry) {
  for (Dict& known : dicts) {
    if (known.dict == entry.holder) return known.entries.push_back(entry);
  }
  hears = hear_of<num_borrowed_changes>(entry.holder) && hears;
  dicts.push_back({entry.holder, kNever, {entry}});
}

bool Borrowed::hold() {
  uint64_t now = num_borrowed_changes;
  if (hears && held_at == now) return true;
  for (Dict& each : dicts) {
    uint64_t version = version_of(each.dict);
    if (version == each.version && version != kNever) continue;
    for (const Entry& entry : each.entries) {
      if (!holds(entry)) return false;
    }
    each.version = version;
  }
  held_at = now;
  return true;
}

bool hold(Guards& guards) {
  for (const Pin& pin : guards.pins) {
    if (!holds(pin)) return false;
  }
  bool are_same = true;
  for (const Function& function : guards.functions) are_same &= function.holds();
  if (!are_same) return false;
  if (!guards.hears || guards.held_at != num_changes) {
    uint64_t now = num_changes;
    if (!guards.dicts.hold()) return false;
    guards.held_at = now;
  }
  if (!guards.others.hold()) return false;
  // Counting up a version stops the processor until its line is there.
  for (const Written& written : guards.written) __builtin_prefetch(written.version, 1);
  const std::vector<Watched>& all = guards.watched;
  for (size_t i = 0; i < all.size(); ++i) {
    if (i + kAhead < all.size()) fetch(all[i + kAhead]);
    if (!holds(all[i], guards.layouts)) return false;
  }
  return true;
}

// The only member of a tensor's version is a pointer to the number, which views share.
const void* counter_of(const Implementation* tensor) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  return *reinterpret_cast<const void* const*>(&tensor->version_counter());
}

bool Guards::add_entry(PyObject* holder, PyObject* key, PyObject* value) {
  contents_of(holder).entries.push_back({holder, key, value});
  return PyList_Check(holder) ? PyLong_Check(key) : PyCell_Check(holder) || (PyMapping_Check(holder) && !PyTuple_Check(holder));
}

bool Guards::add_borrowed(PyObject* holder, PyObject* key, PyObject* value) {
  if (!PyDict_Check(holder)) return false;
  borrowed.add({holder, key, value});
  return true;
}

bool Guards::add_pin(PyObject* owner, bool is_class, PyObject* value) {
  pins.push_back({owner, is_class, value});
  return !is_class || PyType_Check(owner);
}

bool Guards::add_function(PyObject* owner, PyObject* code, PyObject* defaults, PyObject* keyword_defaults) {
  auto part = [](PyObject* value) { return value == Py_None ? nullptr : value; };
  functions.push_back({reinterpret_cast<PyFunctionObject*>(owner), code, part(defaults), part(keyword_defaults)});
  return PyFunction_Check(owner);
}

bool Guards::add_tensor(PyObject* tensor, PyObject* gradient) {
  Place place = place_of(tensor, offset);
  const Implementation* known = *place;
  try {
    const auto* storage = reinterpret_cast<const char*>(known->unsafe_storage().unsafeGetStorageImpl());
    const auto* autograd = known->autograd_meta() ? reinterpret_cast<const char*>(&known->grad()) : nullptr;
    watched.push_back({place, known, known->data(), gradient == Py_None ? nullptr : *place_of(gradient, offset),
                       known->requires_grad(), layouts.size(), storage, autograd});
    layouts.push_back(known->dim());
    layouts.insert(layouts.end(), known->sizes().begin(), known->sizes().end());
    layouts.insert(layouts.end(), known->strides().begin(), known->strides().end());
    return true;
  } catch (const std::exception&) {  // a tensor without memory
    return false;
  }
}

bool Guards::add_written(PyObject* tensor) {
  Place place = place_of(tensor, offset);
  written.push_back({place, counter_of(*place)});
  return !(*place)->is_inference();
}

PyObject* check_guards(PyObject* self, PyObject*) {
  auto& guards = owned<Guards>(self);
  int without = guards.borrowed.dicts.empty() ? 0 : 2;
  try {
    if (!guards.borrowed.hold()) {
      without = 0;
    } else if (hold(guards)) {
      return PyLong_FromLong(1);
    }
  } catch (const std::exception&) {  // a tensor without memory
  }
  PyErr_Clear();
  return PyLong_FromLong(without);
}

PyObject* bump_versions(PyObject* self, PyObject*) {
  for (const Written& written : owned<Guards>(self).written) (*written.place)->bump_version();
  Py_RETURN_NONE;
}

PyMethodDef guards_methods[] = {method("hold", check_guards, METH_NOARGS), method("bump_versions", bump_versions, METH_NOARGS)};

// Of where a Python tensor has its implementation, what stands for no value, and lists: see `QuickGuards` of native.py.
// Gives what looks, and what counts up versions; a ValueError where something cannot be watched.
PyObject* make_guards(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  auto* guards = new Guards{PyLong_AsSize_t(arguments[0])};
  PyObject* self = own(guards);
  if (self == nullptr) return nullptr;
  PyObject* const* lists = arguments + 2;
  auto value_of = [missing = arguments[1]](PyObject* value) { return value == missing ? nullptr : value; };
  bool can_watch = true;
  for (PyObject* each : items(lists[0])) {
    auto entry = items(each);
    can_watch &= guards->add_entry(entry[0], entry[1], value_of(entry[2]));
  }
  for (PyObject* each : items(lists[1])) guards->contents_of(each).lengths.emplace_back(each, PyObject_Size(each));
  for (PyObject* each : items(lists[2])) {
    PyObject *dict = items(each)[0], *keys = items(each)[1];
    guards->contents_of(dict).orders.emplace_back(dict, keys);
    can_watch &= PyDict_Check(dict) && PyTuple_Check(keys);
  }
  for (PyObject* each : items(lists[3])) {
    auto pin = items(each);
    can_watch &= guards->add_pin(pin[0], PyObject_IsTrue(pin[1]), pin[2]);
  }
  for (PyObject* each : items(lists[4])) {
    auto parts = items(each);
    can_watch &= guards->add_function(parts[0], parts[1], parts[2], parts[3]);
  }
  auto gradients = items(lists[6]);
  for (PyObject* each : items(lists[5])) {
    can_watch &= guards->add_tensor(each, gradients.front());
    gradients = gradients.subspan(1);
  }
  for (PyObject* each : items(lists[7])) can_watch &= guards->add_written(each);
  for (PyObject* each : items(lists[8])) {
    auto entry = items(each);
    can_watch &= guards->add_borrowed(entry[0], entry[1], value_of(entry[2]));
  }
  if (!can_watch && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "These conditions are beyond the compiled code.");
  return bind(self, guards_methods);
}

}  // namespace

PyMethodDef of_guards[] = {
    method("make_guards", make_guards),
    {},
};
