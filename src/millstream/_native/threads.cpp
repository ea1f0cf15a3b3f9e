// Streams of a plan on the CPU, run without Python's lock: see `threads_native.py`, which builds them.
//
// Contract
// - A register holds a tensor: written by one stream, read by others after a signal, or before the streams begin.
// - Registers of tensors that Python knows are set and cleared by a thread that holds Python's lock. They hold them for
//   the whole run, so that no count of references reaches the point where PyTorch would ask for the lock.
// - A step that Python must do is a call of a Python object, which takes the lock meanwhile. So does keeping an error.
// - An error on one stream ends the others at their next wait; the first one is reported. The plan is of no use then.

#include <Python.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/inductor/inductor_ops.h>

namespace torch {
void translate_exception_to_python(const std::exception_ptr& error);  // of torch/csrc/Exceptions.h, which takes seconds
}

namespace {

// --- signals between threads

// A wait of so long is spent awake: going to sleep and being woken takes 50 µs or more. It also bridges what Python does
// between two calls of a small network. OpenMP's threads stay awake twenty times as long.
constexpr auto PATIENCE = std::chrono::microseconds(400);

constexpr uintptr_t ALIGNMENT_BYTES = 16;  // as in lower/tensors.py

class Signal {
 public:
  void send(uint32_t number) {
    number_.store(number, std::memory_order_release);
    number_.notify_all();
  }

  void await(uint32_t number) const {
    const auto end = std::chrono::steady_clock::now() + PATIENCE;
    while (number_.load(std::memory_order_acquire) != number) {
      for (int i = 0; i < 32; i++) pause();
      if (std::chrono::steady_clock::now() < end) continue;
      const uint32_t seen = number_.load(std::memory_order_acquire);
      if (seen != number) number_.wait(seen, std::memory_order_acquire);
    }
  }

 private:
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  alignas(64) std::atomic<uint32_t> number_{0};
};

// --- arguments of operators

struct Layout {
  std::vector<int64_t> size, stride;
  int64_t offset;
};

// A value for an operator: a plain one, the tensor in a register or a view of it, or a list of such.
struct Argument {
  c10::IValue plain;
  std::optional<int> reg;
  std::optional<Layout> view;
  std::optional<std::vector<Argument>> items;
};

using Registers = std::vector<at::Tensor>;

c10::TypePtr required(const c10::TypePtr& type) {
  auto optional = type->cast<c10::OptionalType>();
  return optional ? optional->getElementType() : type;
}

// The type of the items of a list; null for what is none.
c10::TypePtr element(const c10::TypePtr& type) {
  auto list = required(type)->cast<c10::ListType>();
  return list ? list->getElementType() : nullptr;
}

bool wants_float(const Argument& argument, const c10::TypePtr& type) {
  return argument.plain.isInt() && required(type)->kind() == c10::TypeKind::FloatType;
}

// Whether an operator takes an argument as it stands; Python is less particular.
bool fits(const Argument& argument, const c10::TypePtr& type) {
  if (argument.reg) return required(type)->kind() == c10::TypeKind::TensorType;
  if (!argument.items) return wants_float(argument, type) || argument.plain.type()->isSubtypeOf(*type);
  const auto fit = [&](const Argument& item) { return fits(item, element(type)); };
  return element(type) && std::all_of(argument.items->begin(), argument.items->end(), fit);
}

c10::IValue evaluate(const Argument& argument, const c10::TypePtr& type, const Registers& registers) {
  if (argument.reg) {
    const at::Tensor& base = registers[*argument.reg];
    if (!argument.view) return base;
    return torch::inductor::_reinterpret_tensor(base, argument.view->size, argument.view->stride, argument.view->offset);
  }
  if (argument.items) {
    c10::impl::GenericList list(element(type));
    for (const Argument& item : *argument.items) list.push_back(evaluate(item, element(type), registers));
    return list;
  }
  return wants_float(argument, type) ? c10::IValue(static_cast<double>(argument.plain.toInt())) : argument.plain;
}

// Whether an argument is the same in every run.
bool is_constant(const Argument& argument) {
  return !argument.reg && (!argument.items || std::all_of(argument.items->begin(), argument.items->end(), is_constant));
}

// --- plans

struct Operand {  // of a C++ kernel: a number, or the beginning of a tensor's memory
  int64_t reg;     // -1 for a number
  int64_t number;  // or which element
};

int64_t address(const at::Tensor& tensor, int64_t number) {
  return reinterpret_cast<int64_t>(tensor.data_ptr()) + number * static_cast<int64_t>(tensor.element_size());
}

struct Result {
  int64_t index;  // among what the operator returns
  int64_t reg;
  std::optional<Layout> promised;  // how kernels take it to lie
};

// A result, or a copy of it with the strides that were promised.
at::Tensor as_promised(at::Tensor tensor, const std::optional<Layout>& promised) {
  if (!promised || tensor.layout() != at::kStrided || tensor.sizes() != at::IntArrayRef(promised->size)) return tensor;
  for (size_t dim = 0; dim < promised->size.size(); dim++) {
    if (tensor.stride(dim) != promised->stride[dim] && promised->size[dim] != 1) {
      const at::Tensor made(at::detail::empty_strided_cpu(promised->size, promised->stride, tensor.scalar_type()));
      return made.copy_(tensor);
    }
  }
  return tensor;
}

struct Stopped {};
struct PythonFailed {};

// Python's lock, for as long as this lives.
class Lock {
 public:
  Lock() : state_(PyGILState_Ensure()) {}
  ~Lock() { PyGILState_Release(state_); }
  Lock(const Lock&) = delete;

 private:
  PyGILState_STATE state_;
};

// The Python exception that is set on this thread, which is not set afterwards.
PyObject* take_exception() {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace) PyException_SetTraceback(value, trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  return value;
}

struct Plan {
  Plan(int num_registers, int num_events, int num_streams, PyObject* python)
      : registers(num_registers), events(num_events), streams(num_streams), python(Py_NewRef(python)) {}

  ~Plan() {
    Py_DECREF(python);
    Py_XDECREF(error);
  }

  struct Step {
    int kernel;
    std::function<void()> run;
  };

  void run_stream(size_t stream) {
    int kernel = -1;
    try {
      for (const Step& step : streams[stream]) {
        kernel = step.kernel;
        step.run();
      }
    } catch (const Stopped&) {
    } catch (...) {
      keep(std::current_exception(), kernel);
      for (Signal& event : events) event.send(run);
    }
  }

  // Keep the first error, as the Python exception that PyTorch makes of it. What Python has raised is still set, on
  // this thread alone, and must not stay so.
  void keep(const std::exception_ptr& found, int kernel) {
    const Lock lock;
    if (!PyErr_Occurred()) translate(found);
    PyObject* exception = take_exception();
    if (stopped.exchange(true)) {
      Py_XDECREF(exception);
    } else {
      error = exception, failed = kernel;
    }
  }

  // As PyTorch does, but for what kernels throw on an index out of range, which is an IndexError in eager mode.
  static void translate(const std::exception_ptr& found) {
    try {
      std::rethrow_exception(found);
    } catch (const std::out_of_range& error) {
      PyErr_SetString(PyExc_IndexError, error.what());
    } catch (...) {
      torch::translate_exception_to_python(found);
    }
  }

  Registers registers;
  std::vector<Signal> events;
  std::vector<std::vector<Step>> streams;
  std::vector<Argument> pending;  // arguments of the next operator
  PyObject* python;  // is called with a kernel that Python must do
  uint32_t run = 0;
  std::atomic<bool> stopped{false};
  PyObject* error = nullptr;
  int failed = -1;  // the kernel; -1 where memory was taken
};

// --- workers

struct Worker {
  Signal ready, done;
  uint32_t number = 0;  // of jobs so far
  const std::function<void()>* job = nullptr;
};

}  // namespace

extern "C" {

// Both for the calling thread alone. PyTorch's `set_num_threads` also notes the number for threads to come, and has MKL
// take no fewer threads for small products: in the whole process, and for good.
extern void omp_set_num_threads(int number) __attribute__((weak));
extern int MKL_Set_Num_Threads_Local(int number) __attribute__((weak));

// Let PyTorch's operators use so many intra-op threads on this thread, and MKL's functions so many; 0 is MKL's default.
// Returns how many MKL's had.
int millstream_use_threads(int number, int of_mkl) {
  if (at::get_num_threads() != number) {  // which PyTorch sets when a thread asks first
    if (!omp_set_num_threads) {
      at::set_num_threads(number);
      return 0;
    }
    omp_set_num_threads(number);
  }
  return MKL_Set_Num_Threads_Local ? MKL_Set_Num_Threads_Local(of_mkl) : 0;
}

Plan* millstream_make(int num_registers, int num_events, int num_streams, PyObject* python) {
  return new Plan(num_registers, num_events, num_streams, python);
}

void millstream_drop(Plan* plan) { delete plan; }

void millstream_set(Plan* plan, int reg, c10::TensorImpl* tensor) {
  using Pointer = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  plan->registers[reg] = at::Tensor(Pointer::reclaim_copy(tensor));
}

// --- steps

void millstream_add_kernel(
    Plan* plan, int stream, int kernel, void (*entry)(const int64_t*), const Operand* operands, int count) {
  std::vector<Operand> given(operands, operands + count);
  plan->streams[stream].push_back({kernel, [=, values = std::vector<int64_t>(count)]() mutable {
    for (int i = 0; i < count; i++) {
      const auto& [reg, number] = given[i];
      values[i] = reg < 0 ? number : address(plan->registers[reg], number);
    }
    entry(values.data());
  }});
}

void millstream_push_none(Plan* plan) { plan->pending.emplace_back(); }
void millstream_push_int(Plan* plan, int64_t value) { plan->pending.push_back({value}); }
void millstream_push_float(Plan* plan, double value) { plan->pending.push_back({value}); }
void millstream_push_bool(Plan* plan, bool value) { plan->pending.push_back({value}); }
void millstream_push_string(Plan* plan, const char* value) { plan->pending.push_back({std::string(value)}); }
void millstream_push_tensor(Plan* plan, int reg) { plan->pending.push_back({{}, reg}); }

void millstream_push_view(Plan* plan, int reg, const int64_t* size, const int64_t* stride, int dims, int64_t offset) {
  plan->pending.push_back({{}, reg, Layout{{size, size + dims}, {stride, stride + dims}, offset}});
}

void millstream_push_list(Plan* plan, int count) {
  std::vector<Argument> items(plan->pending.end() - count, plan->pending.end());
  plan->pending.resize(plan->pending.size() - count);
  plan->pending.push_back({{}, {}, {}, items});
}

// Returns whether there is an operator that takes such arguments. Of each result, there are its position among what it
// returns, its register, and how many dimensions it has, with all sizes and then all strides; -1 if that is not known.
int millstream_add_operator(
    Plan* plan, int stream, int kernel, const char* name, const char* overload, const int64_t* results, int count) {
  std::vector<Argument> arguments;
  arguments.swap(plan->pending);
  const auto found = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!found || found->schema().arguments().size() != arguments.size()) return 0;
  std::vector<c10::TypePtr> types;
  for (size_t i = 0; i < arguments.size(); i++) {
    types.push_back(found->schema().arguments()[i].type());
    if (!fits(arguments[i], types[i])) return 0;
    if (is_constant(arguments[i])) arguments[i] = {evaluate(arguments[i], types[i], {})};
  }
  std::vector<Result> wanted;
  for (int i = 0; i < count; i++) {
    const int64_t index = *results++, reg = *results++, dims = *results++;
    wanted.push_back({index, reg, std::nullopt});
    if (dims < 0) continue;
    wanted.back().promised = Layout{{results, results + dims}, {results + dims, results + 2 * dims}, 0};
    results += 2 * dims;
  }
  plan->streams[stream].push_back({kernel, [=, op = *found, stack = torch::jit::Stack()]() mutable {
    stack.clear();
    for (size_t i = 0; i < arguments.size(); i++) {
      stack.push_back(evaluate(arguments[i], types[i], plan->registers));
    }
    at::AutoDispatchBelowAutograd below;
    op.callBoxed(stack);
    const bool is_list = stack.size() == 1 && stack[0].isTensorList();
    for (const auto& [index, reg, promised] : wanted) {
      const at::Tensor result = is_list ? stack[0].toTensorList().get(index) : stack[index].toTensor();
      plan->registers[reg] = as_promised(result, promised);
    }
    stack.clear();
  }});
  return 1;
}

void millstream_add_python(Plan* plan, int stream, int kernel) {
  plan->streams[stream].push_back({kernel, [=] {
    const Lock lock;
    PyObject* none = PyObject_CallFunction(plan->python, "i", kernel);
    if (!none) throw PythonFailed();
    Py_DECREF(none);
  }});
}

// Memory of the type of the tensor given.
void millstream_add_allocation(
    Plan* plan, int stream, int reg, const int64_t* size, const int64_t* stride, int dims, c10::TensorImpl* like) {
  Layout layout{{size, size + dims}, {stride, stride + dims}, 0};
  plan->streams[stream].push_back({-1, [=, type = c10::typeMetaToScalarType(like->dtype())] {
    plan->registers[reg] = at::detail::empty_strided_cpu(layout.size, layout.stride, type);
  }});
}

void millstream_add_free(Plan* plan, int stream, int reg) {
  plan->streams[stream].push_back({-1, [=] { plan->registers[reg].reset(); }});
}

void millstream_add_record(Plan* plan, int stream, int event) {
  plan->streams[stream].push_back({-1, [=] { plan->events[event].send(plan->run); }});
}

void millstream_add_wait(Plan* plan, int stream, int event) {
  plan->streams[stream].push_back({-1, [=] {
    plan->events[event].await(plan->run);
    if (plan->stopped.load(std::memory_order_relaxed)) throw Stopped();
  }});
}

// --- running

Worker* millstream_make_worker() { return new Worker; }

// The life of a worker's thread.
void millstream_serve(Worker* worker) {
  for (uint32_t number = 1;; number++) {
    worker->ready.await(number);
    (*worker->job)();
    worker->done.send(number);
  }
}

// Put Python's tensors into registers. Returns how many of the first ones are not aligned as kernels take them to be.
int millstream_load(Plan* plan, char** tensors, int place, const int64_t* registers, int count, int num_aligned) {
  int num_misaligned = 0;
  for (int i = 0; i < count; i++) {
    auto* tensor = *reinterpret_cast<c10::TensorImpl**>(tensors[i] + place);
    millstream_set(plan, registers[i], tensor);
    num_misaligned += i < num_aligned && reinterpret_cast<uintptr_t>(tensor->data()) % ALIGNMENT_BYTES;
  }
  return num_misaligned;
}

// Of OpenMP 5: ends the threads that it has for the calling one. Left to themselves they look for work for 10 ms or
// more after a loop that they shared, and keep our workers from their cores.
extern int omp_pause_resource_all(int kind) __attribute__((weak));
constexpr int OMP_PAUSE_SOFT = 1;

// Run the streams, the first one on this thread and the others on workers with so many intra-op threads.
void millstream_run(Plan* plan, Worker** workers, int num_threads) {
  plan->run++;
  if (omp_pause_resource_all) omp_pause_resource_all(OMP_PAUSE_SOFT);
  const at::ThreadLocalState state;
  std::fenv_t arithmetic;  // of this thread's processor, which `torch.set_flush_denormal` changes
  std::fegetenv(&arithmetic);
  std::vector<std::function<void()>> jobs;
  for (size_t stream = 1; stream < plan->streams.size(); stream++) {
    jobs.push_back([&, stream] {
      const at::ThreadLocalStateGuard guard(state);
      std::fesetenv(&arithmetic);
      millstream_use_threads(num_threads, num_threads);
      plan->run_stream(stream);
    });
  }
  for (size_t i = 0; i < jobs.size(); i++) {
    workers[i]->job = &jobs[i];
    workers[i]->ready.send(++workers[i]->number);
  }
  plan->run_stream(0);
  for (size_t i = 0; i < jobs.size(); i++) workers[i]->done.await(workers[i]->number);
}

int millstream_has_failed(Plan* plan) { return plan->stopped.load(); }

int millstream_failed(Plan* plan) { return plan->failed; }

// The first error, which is Python's from here on.
PyObject* millstream_take_error(Plan* plan) { return std::exchange(plan->error, nullptr); }

// A new handle of the tensor in a register, to be given to Python.
at::Tensor* millstream_get(Plan* plan, int reg) { return new at::Tensor(plan->registers[reg]); }

void millstream_clear(Plan* plan, const int64_t* registers, int count) {
  for (int i = 0; i < count; i++) plan->registers[registers[i]].reset();
}

}  // extern "C"
