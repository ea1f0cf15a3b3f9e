// Lets float(number), int(number), sequence[number] and text % number be asked of a stand-in: see conversions.py.
//
// Python converts what they get by __float__ and __index__, which can only give plain numbers. So for a while the
// functions behind the types themselves are others, which look at the type of one argument and go on as before. What a
// class made meanwhile inherits of them goes on as before for good.

#define PY_SSIZE_T_CLEAN
#include "module.h"

namespace {

PyObject* hook = nullptr;  // is called with the type, the sequence or the text, and what has the stand-in
PyObject* stand_ins = nullptr;  // types, the first of them that of indices
PyTypeObject* types[] = {&PyFloat_Type, &PyLong_Type, &PyList_Type, &PyTuple_Type, nullptr};  // the last is NumPy's
vectorcallfunc convert[2];
binaryfunc look_up[3];
binaryfunc format;

bool stands_in(PyObject* value) {
  if (stand_ins == nullptr) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(stand_ins); i++) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(value)) == PyTuple_GET_ITEM(stand_ins, i)) return true;
  }
  return false;
}

bool has_stand_in(PyObject* values) {
  if (PyTuple_CheckExact(values)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values); i++) {
      if (stands_in(PyTuple_GET_ITEM(values, i))) return true;
    }
    return false;
  }
  if (!PyDict_CheckExact(values)) return stands_in(values);
  PyObject *key, *value;
  for (Py_ssize_t i = 0; PyDict_Next(values, &i, &key, &value);) {
    if (stands_in(value)) return true;
  }
  return false;
}

PyObject* ask(PyObject* owner, PyObject* number) {
  return PyObject_CallFunctionObjArgs(hook, owner, number, nullptr);
}

template <int N>
PyObject* converted(PyObject* type, PyObject* const* args, size_t count, PyObject* names) {
  Py_ssize_t given = PyVectorcall_NARGS(count);
  if (given == 1 && names == nullptr && stands_in(args[0])) return ask(type, args[0]);
  if (convert[N] != nullptr) return convert[N](type, args, count, names);
  PyObject* positional = PyTuple_New(given);  // as Python itself does for a type without such a function
  if (positional == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < given; i++) PyTuple_SET_ITEM(positional, i, Py_NewRef(args[i]));
  PyObject* named = names == nullptr ? nullptr : PyDict_New();
  PyObject* result = nullptr;
  bool is_made = names == nullptr || named != nullptr;
  for (Py_ssize_t i = 0; is_made && names != nullptr && i < PyTuple_GET_SIZE(names); i++) {
    is_made = PyDict_SetItem(named, PyTuple_GET_ITEM(names, i), args[given + i]) == 0;
  }
  if (is_made) result = PyType_Type.tp_call(type, positional, named);
  Py_DECREF(positional);
  Py_XDECREF(named);
  return result;
}

template <int N>
PyObject* looked_up(PyObject* sequence, PyObject* key) {
  bool is_index = stand_ins != nullptr && reinterpret_cast<PyObject*>(Py_TYPE(key)) == PyTuple_GET_ITEM(stand_ins, 0);
  return is_index ? ask(sequence, key) : look_up[N](sequence, key);
}

PyObject* formatted(PyObject* text, PyObject* values) {
  return PyUnicode_CheckExact(text) && has_stand_in(values) ? ask(text, values) : format(text, values);
}

}  // namespace

// hook, tuple of the types of stand-ins, NumPy's type of arrays
static PyObject* millstream_conversions_begin(PyObject*, PyObject* const* args, Py_ssize_t) {
  if (hook != nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "conversions are seen already");
    return nullptr;
  }
  hook = Py_NewRef(args[0]);
  stand_ins = Py_NewRef(args[1]);
  types[4] = reinterpret_cast<PyTypeObject*>(args[2]);
  vectorcallfunc others[] = {converted<0>, converted<1>};
  binaryfunc lookups[] = {looked_up<0>, looked_up<1>, looked_up<2>};
  for (int i = 0; i < 2; i++) convert[i] = types[i]->tp_vectorcall, types[i]->tp_vectorcall = others[i];
  for (int i = 0; i < 3; i++) {
    look_up[i] = types[2 + i]->tp_as_mapping->mp_subscript;
    types[2 + i]->tp_as_mapping->mp_subscript = lookups[i];
  }
  format = PyUnicode_Type.tp_as_number->nb_remainder, PyUnicode_Type.tp_as_number->nb_remainder = formatted;
  Py_RETURN_NONE;
}

static PyObject* millstream_conversions_end(PyObject*, PyObject* const*, Py_ssize_t) {
  if (hook == nullptr) Py_RETURN_NONE;
  for (int i = 0; i < 2; i++) types[i]->tp_vectorcall = convert[i];
  for (int i = 0; i < 3; i++) types[2 + i]->tp_as_mapping->mp_subscript = look_up[i];
  PyUnicode_Type.tp_as_number->nb_remainder = format;
  Py_CLEAR(hook);
  Py_CLEAR(stand_ins);
  Py_RETURN_NONE;
}

PyMethodDef of_conversions[] = {
    method("begin_conversions", millstream_conversions_begin),
    method("end_conversions", millstream_conversions_end),
    {},
};
