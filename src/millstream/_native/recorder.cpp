// Says what an instruction of Python is about to read or write: see recorder.py.
//
// In Python 3.11 it is a tracer of the thread's, as debuggers are, and passes on to one that was there. From 3.12 on it
// is called by sys.monitoring, for those code objects alone that the thread has run meanwhile. In both, entries of the
// stack are read where the interpreter keeps them; how many there are is known from the code (opcodes.py).

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#ifndef Py_BUILD_CORE
#define Py_BUILD_CORE
#endif
extern "C" {
#include <internal/pycore_frame.h>
}

#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "module.h"

namespace {

struct Unit {
  uint16_t depth, num_operands, flags, slot;
};
constexpr uint16_t ATOMIC = 1, SLOT = 2, IS_SITE = 0x80;

struct Plan {
  PyObject* made;   // a tuple of what follows, or nullptr for code of no interest
  PyObject* units;  // bytes
  PyObject* sites;  // a dict: what is where
  Py_ssize_t num_units;
  bool is_asked_again;  // whenever the code begins
};

struct Recording {
  PyThreadState* thread;
  PyObject* plan;     // asked for the plan of some code, once
  PyObject* handler;  // told of a site, once for each set of operands
  PyObject* tensor;   // a class whose objects are not kept alive, and so told of each time
  PyObject* null;     // stands for entries of the stack that hold nothing
  PyObject* follows;  // asked whether some code counts, once
  std::unordered_set<PyObject*> followed;  // code that has begun in a pause, and counts
  PyObject* disable;  // answers sys.monitoring that an instruction is of no interest
  std::unordered_map<PyObject*, Plan> plans;
  std::unordered_set<std::string> met;
  std::vector<PyObject*> kept;  // no other object takes the place of one in ``met``
  PyObject* failure = nullptr;  // what the handler has raised: then nothing more is recorded
  int num_pauses = 0;
  bool is_replaced = false;  // another tracer has taken the place of this one
  bool checks_depth = true;
  Py_tracefunc outer = nullptr;  // of Python 3.11
  PyObject* outer_object = nullptr;
  std::unordered_set<PyFrameObject*> asked;  // of whose instructions the outer tracer is told
};

Recording* recording = nullptr;  // at most one in the process: who begins it holds a lock

bool is_atom(PyObject* value) {
  PyTypeObject* type = Py_TYPE(value);
  return value == Py_None || type == &PyLong_Type || type == &PyFloat_Type || type == &PyUnicode_Type ||
         type == &PyBool_Type || type == &PyBytes_Type || type == &PyComplex_Type || value == Py_Ellipsis;
}

void fail(Recording* self) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  if (self->failure == nullptr) {
    self->failure = value;
  } else {
    Py_XDECREF(value);
  }
}

// Whether what Python has said lets the program go on: anything but an exception. The reference is taken over.
bool lets_go_on(PyObject* said) {
  if (said == nullptr || !PyExceptionInstance_Check(said)) return true;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(said)), said);
  return false;
}

// Code begins: asks for its plan when it is new, or is to be asked for each time. Null where an error is set, which the
// program is to get; also where the recording has failed.
const Plan* plan_of(Recording* self, PyObject* code) {
  auto found = self->plans.find(code);
  if (found != self->plans.end() && !found->second.is_asked_again) return &found->second;
  PyObject* made = PyObject_CallOneArg(self->plan, code);
  if (made == nullptr) {
    fail(self);
    return nullptr;
  }
  if (!lets_go_on(made)) {
    Py_DECREF(made);
    return nullptr;
  }
  if (found != self->plans.end()) {
    Py_DECREF(made);
    return &found->second;
  }
  Plan plan{};
  if (PyTuple_Check(made)) {
    PyObject* units = PyTuple_GET_ITEM(made, 0);
    plan = {made, units, PyTuple_GET_ITEM(made, 1), PyBytes_GET_SIZE(units) / static_cast<Py_ssize_t>(sizeof(Unit)),
            PyTuple_GET_ITEM(made, 2) == Py_True};
  } else {
    Py_DECREF(made);
  }
  Py_INCREF(code);
  return &self->plans.emplace(code, plan).first->second;
}

void append(std::string& key, uint64_t tag, uint64_t value) {
  key.append(reinterpret_cast<const char*>(&tag), 1);
  key.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Adds what tells an operand from others; false for one that nothing tells from those to come.
bool append_operand(Recording* self, std::string& key, PyObject* operand) {
  if (PyLong_CheckExact(operand)) {
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(operand, &overflow);
    if (overflow) return false;
    append(key, 1, static_cast<uint64_t>(number));
  } else if (PyFloat_CheckExact(operand)) {
    double number = PyFloat_AS_DOUBLE(operand);
    uint64_t bits;
    std::memcpy(&bits, &number, sizeof(bits));
    append(key, 2, bits);
  } else {
    if (PyObject_TypeCheck(operand, reinterpret_cast<PyTypeObject*>(self->tensor))) return false;
    append(key, 0, reinterpret_cast<uint64_t>(operand));
  }
  return true;
}

// Whether the program is to go on; an error is set if it is not.
bool see(Recording* self, PyObject* code, Py_ssize_t index, PyFrameObject* frame) {
  auto found = self->plans.find(code);
  if (found == self->plans.end() || found->second.made == nullptr || index >= found->second.num_units) return true;
  const Plan& plan = found->second;
  const Unit& unit = reinterpret_cast<const Unit*>(PyBytes_AS_STRING(plan.units))[index];
  if (!(unit.flags & IS_SITE)) return true;
  _PyInterpreterFrame* inner = frame->f_frame;
  int num_variables = reinterpret_cast<PyCodeObject*>(code)->co_nlocalsplus;
#if PY_VERSION_HEX < 0x030C0000
  if (self->checks_depth && inner->stacktop != num_variables + unit.depth) {
    PyErr_Format(PyExc_RuntimeError, "%U, unit %zd: %d entries on the stack, not %d",
                 reinterpret_cast<PyCodeObject*>(code)->co_qualname, index, inner->stacktop - num_variables,
                 static_cast<int>(unit.depth));
    fail(self);
    return true;
  }
#endif
  PyObject** top = inner->localsplus + num_variables + unit.depth;
  bool is_atomic = (unit.flags & ATOMIC) != 0;
  bool is_told_apart = true;
  std::string key;
  key.reserve(9 * (unit.num_operands + 3));
  append(key, 3, reinterpret_cast<uint64_t>(code));
  append(key, 3, static_cast<uint64_t>(index));
  int num_operands = unit.num_operands + ((unit.flags & SLOT) ? 1 : 0);
  auto operand_at = [&](int position) {
    PyObject* value = position < unit.num_operands ? top[position - unit.num_operands] : inner->localsplus[unit.slot];
    return value == nullptr ? self->null : value;
  };
  for (int position = 0; position < num_operands; position++) {
    PyObject* operand = operand_at(position);
    is_atomic = is_atomic && is_atom(operand);
    is_told_apart = is_told_apart && append_operand(self, key, operand);
  }
  if (is_atomic) return true;
  if (num_operands == 0) {  // of variables, which are told by the namespace that they are in
    append(key, 0, reinterpret_cast<uint64_t>(inner->f_globals));
    append(key, 0, reinterpret_cast<uint64_t>(inner->f_locals));
  }
  if (is_told_apart && self->met.count(key)) return true;
  PyObject* operands = PyTuple_New(num_operands);
  PyObject* number = PyLong_FromSsize_t(index);
  PyObject* site = number == nullptr ? nullptr : PyDict_GetItemWithError(plan.sites, number);
  if (operands == nullptr || site == nullptr) {
    fail(self);
    return true;
  }
  for (int position = 0; position < num_operands; position++) {
    PyTuple_SET_ITEM(operands, position, Py_NewRef(operand_at(position)));
  }
  if (is_told_apart) {
    self->met.insert(std::move(key));
    self->kept.push_back(Py_NewRef(operands));
  }
  PyObject* arguments[] = {site, code, number, reinterpret_cast<PyObject*>(frame), operands};
  PyObject* result = PyObject_Vectorcall(self->handler, arguments, 5, nullptr);
  if (result == nullptr) fail(self);
  bool goes_on = lets_go_on(result);
  Py_XDECREF(result);
  Py_DECREF(operands);
  Py_DECREF(number);
  return goes_on;
}

#if PY_VERSION_HEX < 0x030C0000

int trace(PyObject* object, PyFrameObject* frame, int what, PyObject* argument) {
  Recording* self = recording;
  if (self == nullptr) return 0;
  bool is_own = PyThreadState_Get() == self->thread && self->num_pauses == 0 && self->failure == nullptr;
  if (what == PyTrace_OPCODE) {
    if (is_own) {
      PyObject* code = reinterpret_cast<PyObject*>(frame->f_frame->f_code);
      if (!see(self, code, _PyInterpreterFrame_LASTI(frame->f_frame), frame)) return -1;
    }
    if (!self->asked.count(frame)) return 0;
  }
  if (self->outer != nullptr && self->outer(self->outer_object, frame, what, argument) != 0) return -1;
  if (what == PyTrace_CALL && is_own) {
    if (frame->f_trace_opcodes) self->asked.insert(frame);  // the outer tracer wants to be told, too
    const Plan* plan = plan_of(self, reinterpret_cast<PyObject*>(frame->f_frame->f_code));
    if (plan == nullptr && PyErr_Occurred()) return -1;
    if (plan != nullptr && plan->made != nullptr) frame->f_trace_opcodes = 1;
    if (self->outer == nullptr) frame->f_trace_lines = 0;
  } else if (what == PyTrace_RETURN) {  // also of generators, that go on another time
    frame->f_trace_opcodes = self->asked.erase(frame) != 0;
    if (self->outer == nullptr) frame->f_trace_lines = 1;
  }
  return 0;
}

void install(Recording* self) { PyEval_SetTrace(trace, self->outer_object); }

void uninstall(Recording* self) {
  if (self->thread->c_tracefunc == trace) {
    PyEval_SetTrace(self->outer, self->outer_object);
  } else {
    self->is_replaced = true;
  }
}

#else

void install(Recording*) {}
void uninstall(Recording*) {}

#endif

}  // namespace

// plan, handler, tensor class, stand-in for nothing, answer that an instruction is of no interest
static PyObject* millstream_record_begin(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  if (recording != nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "Something is being recorded already.");
    return nullptr;
  }
  Recording* self = new Recording();
  self->thread = PyThreadState_Get();
  self->plan = Py_NewRef(arguments[0]);
  self->handler = Py_NewRef(arguments[1]);
  self->tensor = Py_NewRef(arguments[2]);
  self->null = Py_NewRef(arguments[3]);
  self->disable = Py_NewRef(arguments[4]);
  self->follows = Py_NewRef(arguments[5]);
#if PY_VERSION_HEX < 0x030C0000
  self->outer = self->thread->c_tracefunc;
  self->outer_object = self->thread->c_traceobj;
  Py_XINCREF(self->outer_object);
#endif
  recording = self;
  install(self);
  Py_RETURN_NONE;
}

// Gives what went wrong, or None; and whether another tracer has taken this one's place.
static PyObject* millstream_record_end(PyObject*, PyObject* const*, Py_ssize_t) {
  Recording* self = recording;
  if (self == nullptr) return Py_BuildValue("OO", Py_None, Py_False);
  uninstall(self);
  recording = nullptr;
  for (auto& [code, plan] : self->plans) {
    Py_DECREF(code);
    Py_XDECREF(plan.made);
  }
  for (PyObject* each : self->kept) Py_DECREF(each);
  Py_DECREF(self->plan);
  Py_DECREF(self->handler);
  Py_DECREF(self->tensor);
  Py_DECREF(self->null);
  Py_DECREF(self->disable);
  Py_DECREF(self->follows);
  for (PyObject* code : self->followed) Py_DECREF(code);
  Py_XDECREF(self->outer_object);
  PyObject* result = Py_BuildValue("OO", self->failure == nullptr ? Py_None : self->failure,
                                   self->is_replaced ? Py_True : Py_False);
  Py_XDECREF(self->failure);
  delete self;
  return result;
}

// Nothing is recorded until ``resume``; calls may be nested. Other threads' go unnoticed.
static PyObject* millstream_record_pause(PyObject*, PyObject* const*, Py_ssize_t) {
  Recording* self = recording;
  if (self != nullptr && PyThreadState_Get() == self->thread && self->num_pauses++ == 0) uninstall(self);
  Py_RETURN_NONE;
}

static PyObject* millstream_record_resume(PyObject*, PyObject* const*, Py_ssize_t) {
  Recording* self = recording;
  if (self == nullptr || PyThreadState_Get() != self->thread || self->num_pauses == 0) Py_RETURN_NONE;
  if (--self->num_pauses == 0 && !self->is_replaced) install(self);
  Py_RETURN_NONE;
}

// Goes on in the midst of pauses, and gives how many there are, for ``return_to_pause``.
static PyObject* millstream_record_leave_pause(PyObject*, PyObject* const*, Py_ssize_t) {
  Recording* self = recording;
  if (self == nullptr || PyThreadState_Get() != self->thread || self->num_pauses == 0) return PyLong_FromLong(0);
  int before = self->num_pauses;
  self->num_pauses = 0;
  if (!self->is_replaced) install(self);
  return PyLong_FromLong(before);
}

static PyObject* millstream_record_return_to_pause(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  Recording* self = recording;
  if (self == nullptr || PyThreadState_Get() != self->thread) Py_RETURN_NONE;
  int before = static_cast<int>(PyLong_AsLong(arguments[0]));
  if (before == 0) Py_RETURN_NONE;
  if (self->num_pauses == 0) uninstall(self);
  self->num_pauses += before;
  Py_RETURN_NONE;
}

// A function that runs unseen: ``self`` is a tuple of it and of what is asked, with the second argument, whether it is
// to be seen nevertheless, or None. As a builtin it adds no frame of Python's.
static PyObject* millstream_record_unseen(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  PyObject* function = PyTuple_GET_ITEM(self, 0);
  PyObject* done = millstream_record_pause(nullptr, nullptr, 0);
  Py_XDECREF(done);
  bool is_paused = true;
  if (count > 1 && PyTuple_GET_ITEM(self, 1) != Py_None) {
    PyObject* is_seen = PyObject_CallOneArg(PyTuple_GET_ITEM(self, 1), arguments[1]);
    if (is_seen == nullptr) PyErr_Clear();
    if (is_seen == Py_True) {
      is_paused = false;
      Py_XDECREF(millstream_record_resume(nullptr, nullptr, 0));
    }
    Py_XDECREF(is_seen);
  }
  PyObject* result = PyObject_Vectorcall(function, arguments, static_cast<size_t>(count), names);
  if (is_paused) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    Py_XDECREF(millstream_record_resume(nullptr, nullptr, 0));
    PyErr_Restore(type, value, traceback);
  }
  return result;
}

// code, offset: what sys.monitoring says when code begins or goes on, from Python 3.12 on; of code that is planned, or
// of no interest, nobody is told again until the next recording
static PyObject* millstream_record_begins(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  Recording* self = recording;
  if (self == nullptr || PyThreadState_Get() != self->thread || self->failure != nullptr) Py_RETURN_NONE;
  PyObject* code = arguments[0];
  auto found = self->plans.find(code);
  bool is_asked_again = found != self->plans.end() && found->second.is_asked_again;
  if (found != self->plans.end() && !is_asked_again) return Py_NewRef(self->disable);
  if (self->num_pauses == 0) {
    const Plan* plan = plan_of(self, code);
    if (plan == nullptr && PyErr_Occurred()) return nullptr;
    return Py_NewRef(plan == nullptr || plan->is_asked_again ? Py_None : self->disable);
  }
  if (is_asked_again) Py_RETURN_NONE;
  if (self->followed.count(code)) Py_RETURN_NONE;  // it may yet begin where it counts
  PyObject* is_followed = PyObject_CallOneArg(self->follows, code);
  if (is_followed == nullptr) {
    fail(self);
    Py_RETURN_NONE;
  }
  bool counts = PyObject_IsTrue(is_followed) == 1;
  Py_DECREF(is_followed);
  Py_INCREF(code);
  if (counts) {
    self->followed.insert(code);
    Py_RETURN_NONE;
  }
  self->plans.emplace(code, Plan{});
  return Py_NewRef(self->disable);
}

// code, offset: before an instruction; of one that is no site nobody is told again, in no thread
static PyObject* millstream_record_instruction(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  Recording* self = recording;
  if (self == nullptr) Py_RETURN_NONE;
  auto found = self->plans.find(arguments[0]);
  if (found != self->plans.end() && found->second.made != nullptr) {
    Py_ssize_t index = PyLong_AsSsize_t(arguments[1]) / 2;
    const Unit* units = reinterpret_cast<const Unit*>(PyBytes_AS_STRING(found->second.units));
    if (index >= 0 && index < found->second.num_units && !(units[index].flags & IS_SITE)) {
      return Py_NewRef(self->disable);
    }
  }
  if (self != nullptr && PyThreadState_Get() == self->thread && self->num_pauses == 0 && self->failure == nullptr) {
    PyFrameObject* frame = PyEval_GetFrame();
    Py_ssize_t offset = PyLong_AsSsize_t(arguments[1]);
    if (frame != nullptr && offset >= 0 && !see(self, arguments[0], offset / 2, frame)) return nullptr;
  }
  Py_RETURN_NONE;
}

static PyMethodDef unseen_builtin = method("unseen", millstream_record_unseen, METH_FASTCALL | METH_KEYWORDS);

// A function and what is asked, as above: makes a method of a class of it.
static PyObject* millstream_record_make_unseen(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  PyObject* self = PyTuple_Pack(2, arguments[0], arguments[1]);
  PyObject* builtin = self == nullptr ? nullptr : PyCFunction_NewEx(&unseen_builtin, self, nullptr);
  PyObject* method = builtin == nullptr ? nullptr : PyInstanceMethod_New(builtin);
  Py_XDECREF(self);
  Py_XDECREF(builtin);
  return method;
}

PyMethodDef of_recorder[] = {
    method("begin_recording", millstream_record_begin),
    method("end_recording", millstream_record_end),
    method("pause_recording", millstream_record_pause),
    method("resume_recording", millstream_record_resume),
    method("leave_pause", millstream_record_leave_pause),
    method("return_to_pause", millstream_record_return_to_pause),
    method("code_begins", millstream_record_begins),
    method("instruction_begins", millstream_record_instruction),
    method("make_unseen", millstream_record_make_unseen),
    {},
};
