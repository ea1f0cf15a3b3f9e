// What Python's garbage collector calls, without giving other threads a turn, as a function of Python's would. Python
// 3.11 looks for garbage wherever an object is made, also in the midst of giving a thread's frames to another one: those
// frames are gone once the first thread goes on.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pythread.h>

#include "module.h"

// phase, info: ``self`` is the phase that counts, the thread that does (or None), and a function without arguments.
static PyObject* millstream_collection_phase(PyObject* self, PyObject* const* arguments, Py_ssize_t) {
  PyObject* thread = PyTuple_GET_ITEM(self, 1);
  if (thread != Py_None && PyLong_AsUnsignedLong(thread) != PyThread_get_thread_ident()) Py_RETURN_NONE;
  int is_meant = PyObject_RichCompareBool(arguments[0], PyTuple_GET_ITEM(self, 0), Py_EQ);
  if (is_meant < 0) return nullptr;
  if (is_meant == 0) Py_RETURN_NONE;
  return PyObject_CallNoArgs(PyTuple_GET_ITEM(self, 2));
}

// ``self`` is gc.get_objects and a set, that gets the ids of all objects in the youngest generation.
static PyObject* millstream_note_young(PyObject* self, PyObject* const*, Py_ssize_t) {
  PyObject* youngest = PyLong_FromLong(0);
  PyObject* young = youngest == nullptr ? nullptr : PyObject_CallOneArg(PyTuple_GET_ITEM(self, 0), youngest);
  Py_XDECREF(youngest);
  if (young == nullptr) return nullptr;
  for (PyObject* object : items(young)) {
    PyObject* id = PyLong_FromVoidPtr(object);
    int failed = id == nullptr ? -1 : PySet_Add(PyTuple_GET_ITEM(self, 1), id);
    Py_XDECREF(id);
    if (failed != 0) {
      Py_DECREF(young);
      return nullptr;
    }
  }
  Py_DECREF(young);
  Py_RETURN_NONE;
}

static PyMethodDef phase_builtin = method("of_phase", millstream_collection_phase);
static PyMethodDef young_builtin = method("note_young", millstream_note_young);

// A builtin whose ``self`` are the arguments.
static PyObject* made_of(PyMethodDef* definition, PyObject* const* arguments, Py_ssize_t count) {
  PyObject* self = PyTuple_New(count);
  for (Py_ssize_t i = 0; self != nullptr && i < count; ++i) PyTuple_SET_ITEM(self, i, Py_NewRef(arguments[i]));
  PyObject* builtin = self == nullptr ? nullptr : PyCFunction_NewEx(definition, self, nullptr);
  Py_XDECREF(self);
  return builtin;
}

static PyObject* millstream_of_phase(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  return made_of(&phase_builtin, arguments, 3);
}

static PyObject* millstream_young(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  return made_of(&young_builtin, arguments, 2);
}

PyMethodDef of_collector[] = {
    method("of_phase", millstream_of_phase),
    method("note_young", millstream_young),
    {},
};
