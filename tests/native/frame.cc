#include "frame.h"

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <memory>
#include <utility>

namespace gradops::native {
namespace {

std::atomic<std::int64_t> leaked_errors{0};
std::atomic<const Call*> last_call{nullptr};

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  const Outside outside;
  ++leaked_errors;
  return new XLA_FFI_Error{args->errc, args->message};
}

void GetMessage(XLA_FFI_Error_GetMessage_Args* args) {
  args->message = args->error->message.c_str();
}

void DestroyError(XLA_FFI_Error_Destroy_Args* args) {
  --leaked_errors;
  delete args->error;
}

XLA_FFI_Error* Unavailable() {
  XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, "no thread pool",
                                 XLA_FFI_Error_Code_UNAVAILABLE};
  return CreateError(&args);
}

XLA_FFI_Error* Schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  const Outside outside;
  const bool scheduled =
      args->ctx->pool->Schedule([task = args->task, data = args->data] { task(data); });
  return scheduled ? nullptr : Unavailable();
}

XLA_FFI_Error* NumThreads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  if (args->ctx->pool->helpers() == Helpers::kNone) return Unavailable();
  *args->num_threads = args->ctx->pool->num_threads();
  return nullptr;
}

// No handler may use functions of the API that are missing here.
const XLA_FFI_Api kApi = [] {
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                     XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = CreateError;
  api.XLA_FFI_Error_GetMessage = GetMessage;
  api.XLA_FFI_Error_Destroy = DestroyError;
  api.XLA_FFI_ThreadPool_Schedule = Schedule;
  api.XLA_FFI_ThreadPool_NumThreads = NumThreads;
  return api;
}();

}  // namespace

std::int64_t LeakedErrors() {
  return leaked_errors;
}

Pool::Pool(Helpers helpers, int threads)
    : helpers_(helpers), threads_(helpers == Helpers::kNone ? 1 : threads) {
  if (helpers != Helpers::kThreads) return;
  for (int i = 0; i < threads; ++i) workers_.emplace_back([this] { Work(); });
}

Pool::~Pool() {
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  changed_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  for (const auto& task : tasks_) task();
}

bool Pool::Schedule(std::function<void()> task) {
  if (helpers_ == Helpers::kNone || helpers_ == Helpers::kRefuse) return false;
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  changed_.notify_one();
  return true;
}

void Pool::Work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return over_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    const auto task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    lock.lock();
  }
}

std::size_t Array::bytes() const {
  std::size_t n = width();
  for (const std::int64_t dim : dims) n *= static_cast<std::size_t>(dim);
  return n;
}

std::string Describe(const Call& call) {
  std::string text = call.op + "(";
  for (std::size_t i = 0; i < call.arrays(); ++i) {
    const Array& array = call.array(i);
    text += (i == call.operands.size() ? ") -> ("
             : i > 0                   ? ", "
                                       : "") +
            array.name + " " + Name(static_cast<ffi::DataType>(array.dtype)) + "[";
    for (std::size_t d = 0; d < array.dims.size(); ++d) {
      text += (d > 0 ? "," : "") + std::to_string(array.dims[d]);
    }
    text += "]";
  }
  text += ")";
  for (const Attribute& a : call.attributes) text += " " + a.name + "=" + std::to_string(a.bits);
  return text;
}

void DescribeCrashes() {
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGALRM}) {
    std::signal(signal, [](int number) {
      std::signal(number, SIG_DFL);
      const Call* const call = last_call;
      // This is not safe in a signal handler, but the process ends anyway.
      std::printf("FAILED: signal %d in %s\n", number, call ? Describe(*call).c_str() : "no call");
      std::fflush(stdout);
      std::raise(number);
    });
  }
}

Frame::Frame(const Call& call) : frame{}, call_(call) {
  for (std::size_t i = 0; i < call.arrays(); ++i) dims_.push_back(call.array(i).dims);
  for (std::size_t i = 0; i < call.arrays(); ++i) {
    const Array& array = call.array(i);
    buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, array.dtype, array.data,
                       static_cast<std::int64_t>(dims_[i].size()), dims_[i].data()});
  }
  for (XLA_FFI_Buffer& buffer : buffers) pointers.push_back(&buffer);
  operand_types.assign(call.operands.size(), XLA_FFI_ArgType_BUFFER);
  result_types.assign(call.results.size(), XLA_FFI_RetType_BUFFER);
  attribute_types.assign(call.attributes.size(), XLA_FFI_AttrType_SCALAR);
  for (const Attribute& attribute : call.attributes) {
    values_.push_back(attribute.bits);
    strings_.push_back(attribute.name);
  }
  for (std::size_t i = 0; i < call.attributes.size(); ++i) {
    scalars.push_back({call.attributes[i].dtype, &values_[i]});
    names.push_back({strings_[i].data(), strings_[i].size()});
  }
  for (std::size_t i = 0; i < call.attributes.size(); ++i) {
    scalar_pointers_.push_back(&scalars[i]);
    name_pointers_.push_back(&names[i]);
  }
  const auto size = [](const auto& all) { return static_cast<std::int64_t>(all.size()); };
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &kApi;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, size(call.operands), operand_types.data(),
                pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, size(call.results), result_types.data(),
                pointers.data() + call.operands.size()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr,
                 size(call.attributes),     attribute_types.data(),
                 name_pointers_.data(),     scalar_pointers_.data()};
}

std::optional<XLA_FFI_Error> Frame::Run(XLA_FFI_Handler* handler, Pool& pool) {
  XLA_FFI_ExecutionContext context{&pool};
  last_call = &call_;
  frame.ctx = &context;
  const std::unique_ptr<XLA_FFI_Error> error(handler(&frame));
  const Outside outside;
  if (error == nullptr) return std::nullopt;
  --leaked_errors;
  return *error;
}

}  // namespace gradops::native
