// A stub of Metal's standard library with what naga writes for our kernels, for g++ -fsyntax-only: types and overloads, no behaviour.
#ifndef METAL_STDLIB_STUB
#define METAL_STDLIB_STUB
#define kernel
#define device
#define constant const
#define threadgroup
#define thread

typedef unsigned int uint;
typedef unsigned char uchar;
typedef unsigned short ushort;

namespace metal {
using ::uint;

template <typename T, int N>
struct vec;

template <typename T>
struct vec<T, 2> {
    T x, y;
    vec();
    explicit vec(T);
    vec(T, T);
    template <typename U>
    explicit vec(vec<U, 2>);
    T &operator[](uint);
    T operator[](uint) const;
};

template <typename T>
struct vec<T, 3> {
    T x, y, z;
    vec<T, 2> xy, xz, yz;
    vec();
    explicit vec(T);
    vec(T, T, T);
    template <typename U>
    explicit vec(vec<U, 3>);
    T &operator[](uint);
    T operator[](uint) const;
};

template <typename T>
struct vec<T, 4> {
    T x, y, z, w;
    vec<T, 2> xy, zw, xz, yw, xw, yz;
    vec<T, 3> xyz;
    vec();
    explicit vec(T);
    vec(T, T, T, T);
    vec(vec<T, 2>, vec<T, 2>);
    vec(vec<T, 3>, T);
    vec(T, vec<T, 3>);
    vec(T, T, vec<T, 2>);
    vec(T, vec<T, 2>, T);
    vec(vec<T, 2>, T, T);
    template <typename U>
    explicit vec(vec<U, 4>);
    T &operator[](uint);
    T operator[](uint) const;
};

#define VECTORS(T, name)    \
    typedef vec<T, 2> name##2; \
    typedef vec<T, 3> name##3; \
    typedef vec<T, 4> name##4;
VECTORS(bool, bool)
VECTORS(int, int)
VECTORS(uint, uint)
VECTORS(float, float)
typedef _Float16 half;
VECTORS(_Float16, half)
typedef vec<signed char, 4> char4;
typedef vec<uchar, 4> uchar4;
typedef char4 packed_char4;
typedef uchar4 packed_uchar4;

#define ARITHMETIC(op)                                                    \
    template <typename T, int N> vec<T, N> operator op(vec<T, N>, vec<T, N>); \
    template <typename T, int N> vec<T, N> operator op(vec<T, N>, T);         \
    template <typename T, int N> vec<T, N> operator op(T, vec<T, N>);         \
    template <typename T, int N> vec<T, N> &operator op##=(vec<T, N> &, vec<T, N>);
ARITHMETIC(+)
ARITHMETIC(-)
ARITHMETIC(*)
ARITHMETIC(/)
ARITHMETIC(%)
ARITHMETIC(&)
ARITHMETIC(|)
ARITHMETIC(^)
#define SHIFT(op)                                                       \
    template <typename T, int N> vec<T, N> operator op(vec<T, N>, vec<uint, N>); \
    template <typename T, int N> vec<T, N> operator op(vec<T, N>, uint);
SHIFT(<<)
SHIFT(>>)
#define COMPARISON(op)                                                       \
    template <typename T, int N> vec<bool, N> operator op(vec<T, N>, vec<T, N>); \
    template <typename T, int N> vec<bool, N> operator op(vec<T, N>, T);
COMPARISON(<)
COMPARISON(>)
COMPARISON(<=)
COMPARISON(>=)
COMPARISON(==)
COMPARISON(!=)
template <typename T, int N> vec<T, N> operator-(vec<T, N>);
template <typename T, int N> vec<T, N> operator~(vec<T, N>);
template <int N> vec<bool, N> operator!(vec<bool, N>);

// Metal refuses calls whose arguments differ in type, as these do.
#define UNARY(f)                 \
    float f(float);              \
    template <int N> vec<float, N> f(vec<float, N>);
#define BINARY(f)                                             \
    template <typename T> T f(T, T);                          \
    template <typename T, int N> vec<T, N> f(vec<T, N>, vec<T, N>);
UNARY(exp2)
UNARY(log2)
UNARY(rint)
UNARY(floor)
UNARY(sqrt)
int abs(int);
float abs(float);
template <typename T, int N> vec<T, N> abs(vec<T, N>);
float sign(float);
template <int N> vec<float, N> sign(vec<float, N>);
BINARY(min)
BINARY(max)
template <typename T> T clamp(T, T, T);
float fma(float, float, float);
template <int N> vec<float, N> fma(vec<float, N>, vec<float, N>, vec<float, N>);
template <int N> float dot(vec<float, N>, vec<float, N>);
template <typename T> T select(T, T, bool);
template <typename T, int N> vec<T, N> select(vec<T, N>, vec<T, N>, vec<bool, N>);
// A scalar becomes a vector where one is wanted.
template <typename T> struct itself { typedef T type; };
template <typename T, int N> vec<T, N> select(vec<T, N>, typename itself<T>::type, vec<bool, N>);
template <int N> bool all(vec<bool, N>);
template <int N> bool any(vec<bool, N>);

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
template <typename T> T simd_shuffle(T, uint);
template <typename T> T simd_shuffle_xor(T, uint);
template <typename T> T simd_max(T);

template <typename To, typename From> To as_type(From);
}  // namespace metal
using namespace metal;
#endif
