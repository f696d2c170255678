// XLA's side of a call, by hand: the call frame, the API table behind it, and the thread pool.
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

// How XLA's pool may behave.
enum class Helpers {
  kNone,     // no pool: one thread, and nothing can be scheduled
  kThreads,  // as many as said
  kLate,     // scheduled tasks run when the call is over, and its memory gone
  kRefuse,   // there seem to be threads, but nothing can be scheduled: XLA's header then runs tasks
};

class Pool {
 public:
  Pool(Helpers helpers, int threads);
  ~Pool();  // runs what is still scheduled
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
  bool over_ = false;                        // likewise
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
  bool scratch = false;  // what it holds afterwards says nothing
  void* data = nullptr;

  std::size_t width() const { return ffi::ByteWidth(static_cast<ffi::DataType>(dtype)); }
  std::size_t bytes() const;
};

struct Attribute {
  std::string name;
  XLA_FFI_DataType dtype;
  std::int64_t bits;  // of the value
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

// Prints the last call that was made when the process is about to end by a signal.
void DescribeCrashes();

// A call's frame, which a test may spoil before it runs it.
class Frame {
 public:
  explicit Frame(const Call& call);
  Frame(const Frame&) = delete;

  // What the handler says; nothing: it succeeded.
  std::optional<XLA_FFI_Error> Run(XLA_FFI_Handler* handler, Pool& pool);

  XLA_FFI_CallFrame frame;
  std::vector<XLA_FFI_Buffer> buffers;  // operands, results
  std::vector<void*> pointers;          // to them
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

// Errors that were made and not destroyed; 0 after any call.
std::int64_t LeakedErrors();

// While one lives, this thread is not in a handler, but in what XLA would do for it: allocations.cc
// does not fail what is allocated then.
class Outside {
 public:
  Outside() { ++depth; }
  ~Outside() { --depth; }
  static inline thread_local int depth = 0;
};

}  // namespace gradops::native
