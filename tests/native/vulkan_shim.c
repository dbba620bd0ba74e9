// Preloaded into a test's process: counts what the Vulkan backend submits and waits for. With HOTSET_SHIM_QUEUES=2 a
// device that has one queue shows a second one (the same behind the scenes), so that code for two of them runs. With
// HOTSET_SHIM_KEEP_BUFFERS=1 no buffer is destroyed, for a driver that uses those of stale bindings (tests/lavapipe.py).
// With HOTSET_SHIM_INTEGRATED=1 the device says that it shares its memory with the host.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <vulkan/vulkan.h>

static struct { unsigned long submissions, semaphore_waits, fence_waits, held_back, fills; } counted;
static unsigned long recorded; // command buffers that are not submitted yet

static PFN_vkQueueSubmit real_submit;
static PFN_vkResetFences real_reset_fences;
static PFN_vkEndCommandBuffer real_end;
static PFN_vkGetSemaphoreCounterValue real_look;
static PFN_vkGetPhysicalDeviceQueueFamilyProperties real_families;
static PFN_vkCreateDevice real_create_device;
static PFN_vkGetDeviceQueue2 real_get_queue;
static PFN_vkCmdFillBuffer real_fill;
static PFN_vkGetPhysicalDeviceProperties real_properties;
static PFN_vkGetPhysicalDeviceProperties2 real_properties2;
static pthread_mutex_t submitting = PTHREAD_MUTEX_INITIALIZER; // two queues of the backend may be one of the driver

// submissions, submissions that wait for a semaphore, fences that were waited for and reset, looks at a semaphore while
// something that was recorded was not submitted, buffers that the device was told to fill
void shim_counts(unsigned long out[5]) {
    memcpy(out, &counted, sizeof(counted));
}

static PFN_vkAllocateMemory real_allocate;
static PFN_vkFreeMemory real_free;
static atomic_int held_kind, n_held; // what waits: 1 for taking memory, 2 for giving it back; and how many do

void shim_hold_memory(int kind) {
    held_kind = kind;
}

int shim_n_held(void) {
    return n_held;
}

static void wait_while_held(int kind) {
    n_held++;
    while (held_kind == kind) {
        usleep(500);
    }
    n_held--;
}

static VKAPI_ATTR VkResult VKAPI_CALL allocate(
        VkDevice device, const VkMemoryAllocateInfo * info, const VkAllocationCallbacks * allocator, VkDeviceMemory * out) {
    wait_while_held(1);
    return real_allocate(device, info, allocator, out);
}

static VKAPI_ATTR void VKAPI_CALL give_back(VkDevice device, VkDeviceMemory memory, const VkAllocationCallbacks * allocator) {
    wait_while_held(2);
    real_free(device, memory, allocator);
}

static VKAPI_ATTR VkResult VKAPI_CALL submit(VkQueue queue, uint32_t n, const VkSubmitInfo * infos, VkFence fence) {
    pthread_mutex_lock(&submitting);
    counted.submissions++;
    for (uint32_t i = 0; i < n; i++) {
        counted.semaphore_waits += infos[i].waitSemaphoreCount > 0;
        recorded -= infos[i].commandBufferCount;
    }
    const VkResult result = real_submit(queue, n, infos, fence);
    pthread_mutex_unlock(&submitting);
    return result;
}

static VKAPI_ATTR VkResult VKAPI_CALL reset_fences(VkDevice device, uint32_t n, const VkFence * fences) {
    counted.fence_waits += n;
    return real_reset_fences(device, n, fences);
}

static VKAPI_ATTR VkResult VKAPI_CALL end(VkCommandBuffer buffer) {
    recorded++;
    return real_end(buffer);
}

static VKAPI_ATTR VkResult VKAPI_CALL look(VkDevice device, VkSemaphore semaphore, uint64_t * value) {
    counted.held_back += recorded > 0;
    return real_look(device, semaphore, value);
}

static VKAPI_ATTR void VKAPI_CALL fill(VkCommandBuffer commands, VkBuffer buffer, VkDeviceSize at, VkDeviceSize size, uint32_t value) {
    counted.fills++;
    real_fill(commands, buffer, at, size, value);
}

static VKAPI_ATTR void VKAPI_CALL properties(VkPhysicalDevice device, VkPhysicalDeviceProperties * out) {
    real_properties(device, out);
    out->deviceType = VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU;
}

static VKAPI_ATTR void VKAPI_CALL properties2(VkPhysicalDevice device, VkPhysicalDeviceProperties2 * out) {
    real_properties2(device, out);
    out->properties.deviceType = VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU;
}

static VKAPI_ATTR void VKAPI_CALL families(VkPhysicalDevice device, uint32_t * n, VkQueueFamilyProperties * out) {
    real_families(device, n, out);
    for (uint32_t i = 0; out != NULL && i < *n; i++) {
        out[i].queueCount += out[i].queueCount == 1;
    }
}

static VKAPI_ATTR VkResult VKAPI_CALL create_device(
        VkPhysicalDevice physical, const VkDeviceCreateInfo * info, const VkAllocationCallbacks * allocator, VkDevice * out) {
    VkDeviceCreateInfo      changed = *info;
    VkDeviceQueueCreateInfo queues[8];
    for (uint32_t i = 0; i < info->queueCreateInfoCount && i < 8; i++) {
        queues[i] = info->pQueueCreateInfos[i];
        queues[i].queueCount = 1;
    }
    changed.pQueueCreateInfos = queues;
    return real_create_device(physical, &changed, allocator, out);
}

static VKAPI_ATTR void VKAPI_CALL get_queue(VkDevice device, const VkDeviceQueueInfo2 * info, VkQueue * out) {
    VkDeviceQueueInfo2 first = *info;
    first.queueIndex = 0;
    real_get_queue(device, &first, out);
}

static VKAPI_ATTR void VKAPI_CALL keep_buffer(VkDevice device, VkBuffer buffer, const VkAllocationCallbacks * allocator) {
    (void) device, (void) buffer, (void) allocator;
}

static PFN_vkDestroyBuffer real_destroy_buffer;

static int is_set(const char * name, const char * value) {
    const char * found = getenv(name);
    return found != NULL && strcmp(found, value) == 0;
}

static PFN_vkVoidFunction replaced(const char * name, PFN_vkVoidFunction real) {
#define REPLACE(vk_name, keep, with) if (strcmp(name, vk_name) == 0) { *(PFN_vkVoidFunction *) &keep = real; return (PFN_vkVoidFunction) with; }
    REPLACE("vkQueueSubmit", real_submit, submit)
    REPLACE("vkResetFences", real_reset_fences, reset_fences)
    REPLACE("vkEndCommandBuffer", real_end, end)
    REPLACE("vkGetSemaphoreCounterValue", real_look, look)
    REPLACE("vkCmdFillBuffer", real_fill, fill)
    REPLACE("vkAllocateMemory", real_allocate, allocate)
    REPLACE("vkFreeMemory", real_free, give_back)
    if (is_set("HOTSET_SHIM_KEEP_BUFFERS", "1")) {
        REPLACE("vkDestroyBuffer", real_destroy_buffer, keep_buffer)
    }
    if (is_set("HOTSET_SHIM_INTEGRATED", "1")) {
        REPLACE("vkGetPhysicalDeviceProperties", real_properties, properties)
        REPLACE("vkGetPhysicalDeviceProperties2", real_properties2, properties2)
    }
    if (is_set("HOTSET_SHIM_QUEUES", "2")) {
        REPLACE("vkGetPhysicalDeviceQueueFamilyProperties", real_families, families)
        REPLACE("vkCreateDevice", real_create_device, create_device)
        REPLACE("vkGetDeviceQueue2", real_get_queue, get_queue)
    }
    return real;
}

VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL vkGetInstanceProcAddr(VkInstance instance, const char * name) {
    static PFN_vkGetInstanceProcAddr next;
    if (next == NULL) {
        // the backend loads the loader for itself alone, so it is not among the libraries behind this one
        void * loader = dlopen("libvulkan.so.1", RTLD_LAZY);
        next = loader == NULL ? NULL : (PFN_vkGetInstanceProcAddr) dlsym(loader, "vkGetInstanceProcAddr");
    }
    if (next == NULL) {
        return NULL;
    }
    const PFN_vkVoidFunction real = next(instance, name);
    return real == NULL ? NULL : replaced(name, real);
}
