// What happens to every batch on its way to a device, and must not wait for the interpreter: filling pinned memory with
// several threads, and enqueueing a copy between events.
//
// Contract
// - `millstream_fill` copies bytes and returns when all are there. Its helpers are shared by the process; while one call
//   has them, another one copies alone.
// - Nobody waits for a helper that sleeps: bytes are dealt in chunks, and who is awake takes the next one.
// - `millstream_enqueue` gives the first error of the device's driver, and 0 if there was none.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kChunkBytes = 256 << 10;
constexpr size_t kWakeBytes = 2 << 20;  // below, one thread is done before a sleeping one has woken up (50 to 200 us)
constexpr auto kSpin = std::chrono::microseconds(200);

struct Work {
  const std::vector<size_t>* starts;  // of each piece, if all lay one behind the other; and the end
  char* const* to;
  const char* const* from;
  int num_threads;
};

class Team {
 public:
  explicit Team(int num_helpers) {
    for (int i = 0; i < num_helpers; ++i) std::thread(&Team::help, this, i).detach();
  }

  // False if somebody else has the team.
  bool fill(const Work& work) {
    std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    work_ = work;
    next_ = 0;
    open_ = true;
    ++generation_;
    if (work.starts->back() >= kWakeBytes) generation_.notify_all();
    take_chunks();
    // Who comes in from here on sees that the work is closed, and does not look at it.
    open_ = false;
    while (inside_ != 0) std::this_thread::yield();
    return true;
  }

 private:
  void help(int index) {
    unsigned seen = 0;
    bool spins = false;
    for (;;) {
      auto begin = Clock::now();
      while (generation_ == seen) {
        if (!spins || Clock::now() - begin > kSpin) {
          generation_.wait(seen);
        } else {
          std::this_thread::yield();
        }
      }
      spins = Clock::now() - begin < kSpin;  // where batches follow each other so closely, the next one will, too
      seen = generation_;
      ++inside_;
      if (open_ && index + 1 < work_.num_threads) take_chunks();
      --inside_;
    }
  }

  void take_chunks() {
    const std::vector<size_t>& starts = *work_.starts;
    for (;;) {
      size_t at = kChunkBytes * next_.fetch_add(1);
      if (at >= starts.back()) return;
      size_t end = std::min(at + kChunkBytes, starts.back());
      size_t piece = std::upper_bound(starts.begin(), starts.end(), at) - starts.begin() - 1;
      for (; at < end; ++piece) {
        size_t offset = at - starts[piece], length = std::min(end, starts[piece + 1]) - at;
        std::memcpy(work_.to[piece] + offset, work_.from[piece] + offset, length);
        at += length;
      }
    }
  }

  std::mutex busy_;
  Work work_{};
  std::atomic<size_t> next_{0};
  std::atomic<bool> open_{false};
  std::atomic<int> inside_{0};
  std::atomic<unsigned> generation_{0};
};

// Of CUDA's driver interface.
struct Driver {
  int (*copy)(uint64_t to, const void* from, size_t num_bytes, void* stream);
  int (*record)(void* event, void* stream);
};

}  // namespace

extern "C" {

// Never dropped: its threads are somewhere in it when the process ends.
Team* millstream_make_team(int num_helpers) { return new Team(num_helpers); }

void millstream_fill(Team* team, size_t num_pieces, char* const* to, const char* const* from, const size_t* num_bytes,
                     int num_threads) {
  std::vector<size_t> starts(num_pieces + 1);
  for (size_t i = 0; i < num_pieces; ++i) starts[i + 1] = starts[i] + num_bytes[i];
  if (num_threads > 1 && starts.back() > kChunkBytes && team->fill({&starts, to, from, num_threads})) return;
  for (size_t i = 0; i < num_pieces; ++i) std::memcpy(to[i], from[i], num_bytes[i]);
}

int millstream_enqueue(const Driver* driver, void* stream, size_t num_before, void* const* before, size_t num_copies,
                       const uint64_t* to, const void* const* from, const size_t* num_bytes, size_t num_after,
                       void* const* after) {
  int error = 0;
  for (size_t i = 0; i < num_before && !error; ++i) error = driver->record(before[i], stream);
  for (size_t i = 0; i < num_copies && !error; ++i) error = driver->copy(to[i], from[i], num_bytes[i], stream);
  for (size_t i = 0; i < num_after && !error; ++i) error = driver->record(after[i], stream);
  return error;
}

}  // extern "C"
