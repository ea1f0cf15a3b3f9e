// What happens to every batch on its way to a device, and must not wait for the interpreter: filling pinned memory with
// several threads, and enqueueing a copy between events.
//
// Contract
// - `begin` lets helpers copy and returns at once; what is short it copies itself, and returns None.
//   `finish`, called from any thread, copies what is left and returns when all bytes are there; a second call
//   returns at once. Both are called with Python's lock held; the second gives it away meanwhile.
// - What `begin` returns else is a capsule of Python's, which keeps the owner of the memory on both sides alive, and
//   which finishes when it is dropped: Ctrl-C after any line of Python cannot leave helpers to memory that is gone.
// - Helpers are shared by the process, and work for one filling at a time.
// - Nobody waits for a helper that sleeps: bytes are dealt in chunks, and a helper that is awake takes the next one.
// - Addresses and numbers are integers of Python's. All but what makes something is called for every batch.
// - `enqueue` gives the first error of the device's driver, and 0 if there was none; so do `open_nodes` and
//   `close_nodes`, which let copies within a graph happen, or not, in the launches to come. After an error some may.

#include <pthread.h>
#include <signal.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

#include "module.h"

namespace {

using Clock = std::chrono::steady_clock;

size_t count(PyObject* number) { return reinterpret_cast<size_t>(PyLong_AsVoidPtr(number)); }

constexpr size_t kChunkBytes = 64 << 10;
constexpr size_t kShortBytes = 128 << 10;  // copied in less time than Python's lock takes to come back from another thread
constexpr size_t kWakeBytes = 256 << 10;  // so many for each thread that is woken, which takes some 50 us
constexpr size_t kLine = 64;  // bytes
constexpr size_t kLeastPast = 1 << 10;  // of a piece that is copied past caches
constexpr int kMany = 4;  // helpers, so that one thread more is no matter
constexpr int kCalled = 3;  // by the one that begins; these call the others
constexpr int kPauses = 16;
constexpr auto kSpin = std::chrono::microseconds(500);

// A copy that the processor's caches keep nothing of.
void copy_past_caches(char* to, const char* from, size_t num_bytes) {
#ifdef __SSE2__
  if (num_bytes >= kLeastPast) {
    size_t first = -reinterpret_cast<uintptr_t>(to) % kLine;  // whole lines only: of others, the rest would be read first
    std::memcpy(to, from, first);
    to += first, from += first, num_bytes -= first;
    for (; num_bytes >= kLine; to += kLine, from += kLine, num_bytes -= kLine) {
      auto* source = reinterpret_cast<const __m128i*>(from);
      auto* target = reinterpret_cast<__m128i*>(to);
      __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1), c = _mm_loadu_si128(source + 2),
              d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(target, a);
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    }
    _mm_sfence();  // such stores are in no order with others, as that which says that all is copied
  }
#endif
  std::memcpy(to, from, num_bytes);
}

void copy_plainly(char* to, const char* from, size_t num_bytes) { std::memcpy(to, from, num_bytes); }

using Copy = decltype(copy_plainly);

// Pieces of memory on their way to other places.
struct Filling {
  Filling(size_t num_pieces, char* const* to, const char* const* from, const size_t* num_bytes, int num_threads,
          Copy* copy, PyObject* owner)
      : copy(copy),
        to(to, to + num_pieces),
        from(from, from + num_pieces),
        starts(num_pieces + 1),
        num_threads(num_threads),
        owner(owner) {
    for (size_t i = 0; i < num_pieces; ++i) starts[i + 1] = starts[i] + num_bytes[i];
  }

  // False when there is none left.
  bool copy_chunk() {
    size_t at = kChunkBytes * next.fetch_add(1);
    if (at >= starts.back()) return false;
    size_t end = std::min(at + kChunkBytes, starts.back());
    size_t piece = std::upper_bound(starts.begin(), starts.end(), at) - starts.begin() - 1;
    for (; at < end; ++piece) {
      size_t offset = at - starts[piece], length = std::min(end, starts[piece + 1]) - at;
      copy(to[piece] + offset, from[piece] + offset, length);
      at += length;
    }
    return true;
  }

  Copy* const copy;
  std::vector<char*> to;
  std::vector<const char*> from;
  std::vector<size_t> starts;  // of each piece, if all lay one after the other; and the end
  std::atomic<size_t> next{0};
  const int num_threads;
  int num_helpers = 0;
  PyObject* const owner;
  class Team* team = nullptr;
  std::atomic<bool> finished{false};
};

// Waits a moment for another thread. A processor often runs two threads, of which one that spins slows the other down, and
// the more, the more often it asks the system.
void pause_a_moment() {
#ifdef __SSE2__
  for (int i = 0; i < kPauses; ++i) _mm_pause();
#endif
  std::this_thread::yield();
}

class Team {
 public:
  explicit Team(int num_helpers) : calls_(num_helpers) {
    sigset_t others, before;  // what is not a fault of this very thread is for Python's threads
    sigfillset(&others);
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) sigdelset(&others, fault);
    pthread_sigmask(SIG_SETMASK, &others, &before);
    try {
      for (; num_helpers_ < num_helpers; ++num_helpers_) std::thread(&Team::help, this, num_helpers_).detach();
    } catch (const std::system_error&) {  // the system grants no more
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void begin(Filling& filling) {
    int most = std::min(num_helpers_, filling.num_threads - 1);
    int wanted = std::min<size_t>(std::max(most, 0), filling.starts.back() / kWakeBytes);
    if (wanted <= 0 || busy_.exchange(true)) return;
    filling.num_helpers = wanted;
    num_wanted_ = wanted;
    filling_ = &filling;
    for (int i = 0; i < std::min(wanted, kCalled); ++i) call(i);
  }

  void finish(Filling& filling) {
    if (filling.num_helpers == 0) begin(filling);  // another one may have had them
    // Of many helpers none is missed, and what the interpreter will need next stays in this processor's cache.
    bool leaves_it = filling.num_helpers >= kMany;
    do {
      while (leaves_it && num_inside_ > 0) pause_a_moment();
    } while (filling.copy_chunk());
    if (filling.num_helpers == 0) return;
    // A helper that comes in from here on sees that there is nothing to do.
    filling_ = nullptr;
    while (num_inside_ != 0) pause_a_moment();
    busy_ = false;
  }

 private:
  struct alignas(kLine) Calls {
    std::atomic<unsigned> count{0};
    std::atomic<bool> sleeps{false};
  };

  // To wake a thread takes the caller some microseconds; a thread that spins comes by itself. The library asks the system even
  // where only another helper sleeps: it keeps one number for all of them.
  void call(int helper) {
    ++calls_[helper].count;
    if (calls_[helper].sleeps) calls_[helper].count.notify_one();
  }

  void help(int self) {
    auto& [calls, sleeps] = calls_[self];
    unsigned seen = 0;
    bool spins = false;
    for (;;) {
      auto begin = Clock::now();
      while (calls == seen) {
        if (!spins || Clock::now() - begin > kSpin) {
          sleeps = true;  // before it looks once more whether it was called
          calls.wait(seen);
          sleeps = false;
        } else {
          pause_a_moment();
        }
      }
      spins = Clock::now() - begin < kSpin;  // where batches follow each other so closely, the next one will, too
      seen = calls;
      for (int i = self + kCalled; self < kCalled && i < num_wanted_; i += kCalled) call(i);
      bool has_room = ++num_inside_ <= num_wanted_;  // a late helper may meet a filling that is for fewer
      Filling* filling = filling_;
      while (has_room && filling && filling->copy_chunk()) {
      }
      --num_inside_;
    }
  }

  std::vector<Calls> calls_;  // of each helper
  int num_helpers_ = 0;
  std::atomic<bool> busy_{false};
  std::atomic<Filling*> filling_{nullptr};
  std::atomic<int> num_wanted_{0};
  std::atomic<int> num_inside_{0};
};

void finish_once(Filling* filling) {
  if (!filling->finished.exchange(true)) filling->team->finish(*filling);
}

void drop(PyObject* capsule) {
  auto* filling = static_cast<Filling*>(PyCapsule_GetPointer(capsule, nullptr));
  finish_once(filling);
  Py_DecRef(filling->owner);
  delete filling;
}

// Of CUDA's driver interface.
struct Driver {
  int (*copy)(uint64_t to, const void* from, size_t num_bytes, void* stream);
  int (*record)(void* event, void* stream);
  int (*wait)(void* stream, void* event, unsigned flags);
};

// CUDA_MEMCPY3D of cuda.h (CUDA 12 and 13), as in memcpy_nodes.py: of it, the two addresses on devices count here.
struct GraphCopy {
  uint64_t words[25];
};

constexpr int kFrom = 6, kTo = 17;  // are these words

// A copy in a CUDA graph, one end of which lies elsewhere in each launch.
struct MemcpyNode {
  void* node;
  GraphCopy copy;
  bool leads_in;

  uint64_t& outer() { return copy.words[leads_in ? kFrom : kTo]; }
};

struct MemcpyNodes {
  int (*set)(void* graph, void* node, const GraphCopy* copy, void* context);  // of CUDA's driver interface
  int (*enable)(void* graph, void* node, unsigned is_enabled);                // likewise
  void* graph;
  void* context;
  std::vector<MemcpyNode> copies;
  std::optional<bool> open = true;  // none: some may be
};

int enable(MemcpyNodes& nodes, bool open) {
  if (nodes.open == open) return 0;
  nodes.open.reset();
  for (MemcpyNode& node : nodes.copies) {
    if (int error = nodes.enable(nodes.graph, node.node, open)) return error;
  }
  nodes.open = open;
  return 0;
}

// Of a number of helpers. Never dropped: its threads are somewhere in it when the process ends.
PyObject* make_team(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  return PyLong_FromVoidPtr(new Team(static_cast<int>(count(arguments[0]))));
}

// Of a team, a number of pieces, where they go, their lengths, a number of threads, whether to copy past caches, where the
// pieces are, and an owner.
PyObject* begin(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  auto* team = pointer<Team>(arguments[0]);
  size_t num_pieces = count(arguments[1]);
  auto* to = pointer<char* const>(arguments[2]);
  auto* num_bytes = pointer<const size_t>(arguments[3]);
  int num_threads = static_cast<int>(count(arguments[4]));
  Copy* copy = count(arguments[5]) ? copy_past_caches : copy_plainly;
  auto* from = pointer<const char* const>(arguments[6]);
  PyObject* owner = arguments[7];
  if (PyErr_Occurred()) return nullptr;
  if (std::accumulate(num_bytes, num_bytes + num_pieces, size_t{0}) <= kShortBytes) {
    for (size_t i = 0; i < num_pieces; ++i) copy(to[i], from[i], num_bytes[i]);
    Py_RETURN_NONE;
  }
  Filling* filling = new Filling(num_pieces, to, from, num_bytes, num_threads, copy, owner);
  PyObject* capsule = PyCapsule_New(filling, nullptr, drop);
  if (capsule == nullptr) {
    delete filling;
    return nullptr;
  }
  Py_IncRef(owner);
  filling->team = team;
  team->begin(*filling);
  return capsule;
}

// Of what the former has returned.
PyObject* finish(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  auto* filling = static_cast<Filling*>(PyCapsule_GetPointer(arguments[0], nullptr));
  if (filling == nullptr) return nullptr;
  PyThreadState* state = PyEval_SaveThread();
  finish_once(filling);
  PyEval_RestoreThread(state);
  Py_RETURN_NONE;
}

// Of a driver and an order: the stream; how many events to wait for, events to record before, copies, and events after;
// then each of these. A copy is where to, where from, and how many bytes.
PyObject* enqueue(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  auto* driver = pointer<const Driver>(arguments[0]);
  auto* order = pointer<const uint64_t>(arguments[1]);  // whatever comes after keeps it alive
  if (PyErr_Occurred()) return nullptr;
  void* stream = reinterpret_cast<void*>(order[0]);
  const uint64_t* waits = order + 5;
  const uint64_t* before = waits + order[1];
  const uint64_t* copies = before + order[2];
  const uint64_t* after = copies + 3 * order[3];
  const uint64_t* end = after + order[4];
  int error = 0;
  for (const uint64_t* at = waits; at < before && !error; ++at) error = driver->wait(stream, reinterpret_cast<void*>(*at), 0);
  for (const uint64_t* at = before; at < copies && !error; ++at)
    error = driver->record(reinterpret_cast<void*>(*at), stream);
  for (const uint64_t* at = copies; at < after && !error; at += 3)
    error = driver->copy(at[0], reinterpret_cast<const void*>(at[1]), at[2], stream);
  for (const uint64_t* at = after; at < end && !error; ++at) error = driver->record(reinterpret_cast<void*>(*at), stream);
  return PyLong_FromLong(error);
}

// Of a function of CUDA's driver interface, and the one pointer that it takes.
PyObject* call(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  auto function = reinterpret_cast<int (*)(void*)>(PyLong_AsVoidPtr(arguments[0]));
  auto* argument = pointer<void>(arguments[1]);
  if (PyErr_Occurred()) return nullptr;
  return PyLong_FromLong(function(argument));
}

// Let the copies happen in the launches to come, to and from the addresses at this one; gives the driver's first error.
PyObject* open_nodes(PyObject* self, PyObject* address) {
  auto& nodes = owned<MemcpyNodes>(self);
  const auto* addresses = pointer<const uint64_t>(address);
  if (PyErr_Occurred()) return nullptr;
  for (MemcpyNode& node : nodes.copies) {
    uint64_t address = *addresses++;
    if (node.outer() == address) continue;
    node.outer() = address;
    if (int error = nodes.set(nodes.graph, node.node, &node.copy, nodes.context)) {
      node.outer() = 0;  // not to be trusted again
      return PyLong_FromLong(error);
    }
  }
  return PyLong_FromLong(enable(nodes, true));
}

// Let them not happen.
PyObject* close_nodes(PyObject* self, PyObject*) { return PyLong_FromLong(enable(owned<MemcpyNodes>(self), false)); }

PyMethodDef nodes_methods[] = {method("open_nodes", open_nodes, METH_O), method("close_nodes", close_nodes, METH_NOARGS)};

// Of two functions of the driver's, a graph, a context, and a list of copies: of each the node, the address of what it is
// told, and whether it leads into the graph. Gives what opens and what closes them.
PyObject* make_nodes(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  auto* nodes = new MemcpyNodes{reinterpret_cast<decltype(MemcpyNodes::set)>(PyLong_AsVoidPtr(arguments[0])),
                                reinterpret_cast<decltype(MemcpyNodes::enable)>(PyLong_AsVoidPtr(arguments[1])),
                                pointer<void>(arguments[2]), pointer<void>(arguments[3]), {}};
  PyObject* self = own(nodes);
  if (self == nullptr) return nullptr;
  for (PyObject* each : items(arguments[4])) {
    auto copy = items(each);
    auto* told = pointer<const GraphCopy>(copy[1]);
    if (told != nullptr) nodes->copies.push_back({pointer<void>(copy[0]), *told, copy[2] == Py_True});
  }
  return bind(self, nodes_methods);
}

}  // namespace

PyMethodDef of_copies[] = {
    method("make_team", make_team),
    method("begin", begin),
    method("finish", finish),
    method("enqueue", enqueue),
    method("call", call),
    method("make_nodes", make_nodes),
    {},
};
