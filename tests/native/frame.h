// XLA's side of a call, made by hand: the call frame, its API table, and the thread pool.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/dtype.h"
#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  std::string message;
};

namespace gradops::native {

// The ways in which XLA's pool may behave.
enum class Helpers {
  kNone,     // no pool: there is one thread, and nothing can be scheduled
  kThreads,  // the given number of threads
  kLate,     // scheduled tasks run only after the call, when its memory is gone
  // The pool reports threads, but refuses every task. XLA's header then runs the tasks itself.
  kRefuse,
};

class Pool {
 public:
  Pool(Helpers helpers, int threads);
  ~Pool();  // runs all tasks that are left
  bool Schedule(std::function<void()> task);
  std::int64_t num_threads() const { return threads_; }
  Helpers helpers() const { return helpers_; }

 private:
  void Work();

  Helpers helpers_;
  std::int64_t threads_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;  // guarded by mutex_
  bool over_ = false;                        // guarded by mutex_
};

}  // namespace gradops::native

struct XLA_FFI_ExecutionContext {
  gradops::native::Pool* pool;
};

namespace gradops::native {

struct Array {
  std::string name;
  XLA_FFI_DataType dtype;
  std::vector<std::int64_t> dims;
  bool scratch = false;  // its content after a call is arbitrary
  void* data = nullptr;

  std::size_t width() const { return ffi::ByteWidth(static_cast<ffi::DataType>(dtype)); }
  std::size_t bytes() const;
};

struct Attribute {
  std::string name;
  XLA_FFI_DataType dtype;
  std::int64_t bits;  // the value's bits
};

struct Call {
  std::string op;
  std::vector<Array> operands = {}, results = {};
  std::vector<Attribute> attributes = {};  // sorted by name

  // Operands first, then results.
  Array& array(std::size_t i) {
    return i < operands.size() ? operands[i] : results[i - operands.size()];
  }
  const Array& array(std::size_t i) const { return const_cast<Call*>(this)->array(i); }
  std::size_t arrays() const { return operands.size() + results.size(); }
};

std::string Describe(const Call& call);

// If a signal is about to end the process, prints the last call.
void DescribeCrashes();

// A call's frame. A test may spoil the frame before the run.
class Frame {
 public:
  explicit Frame(const Call& call);
  Frame(const Frame&) = delete;

  // The handler's error, or nothing if it succeeded.
  std::optional<XLA_FFI_Error> Run(XLA_FFI_Handler* handler, Pool& pool);

  XLA_FFI_CallFrame frame;
  std::vector<XLA_FFI_Buffer> buffers;  // operands, results
  std::vector<void*> pointers;          // pointers to the buffers
  std::vector<XLA_FFI_ArgType> operand_types;
  std::vector<XLA_FFI_RetType> result_types;
  std::vector<XLA_FFI_AttrType> attribute_types;
  std::vector<XLA_FFI_Scalar> scalars;
  std::vector<XLA_FFI_ByteSpan> names;

 private:
  const Call& call_;
  std::vector<std::int64_t> values_;
  std::vector<std::vector<std::int64_t>> dims_;
  std::vector<std::string> strings_;
  std::vector<void*> scalar_pointers_;
  std::vector<XLA_FFI_ByteSpan*> name_pointers_;
};

// Errors that were created but not destroyed; 0 after any call.
std::int64_t LeakedErrors();

// While an object lives, this thread does XLA's work, not a handler's. Allocations then never fail
// in allocations.cc.
class Outside {
 public:
  Outside() { ++depth; }
  ~Outside() { --depth; }
  static inline thread_local int depth = 0;
};

}  // namespace gradops::native
