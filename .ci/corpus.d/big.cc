// Templates that keep a compiler busy.
#include <algorithm>
#include <functional>
#include <map>
#include <regex>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

template <int N> struct Node { using Left = Node<N - 1>; static constexpr long value = Left::value * 31 + N; };
template <> struct Node<0> { static constexpr long value = 1; };

template <typename T, int... I> auto tuples(std::integer_sequence<int, I...>) {
    return std::make_tuple(std::map<T, std::vector<std::tuple<T, decltype(I)>>>{}...);
}

int main(int argc, char **argv) {
    std::regex words("(\\w+)\\s*(\\d*)");
    std::map<std::string, std::function<long(long)>> table;
    table["a"] = [](long x) { return x + Node<700>::value; };
    std::vector<std::variant<int, std::string, double>> values{1, "a", 2.0};
    auto all = tuples<std::string>(std::make_integer_sequence<int, 60>{});
    std::sort(values.begin(), values.end(), [](auto &a, auto &b) { return a.index() < b.index(); });
    return int(table["a"](argc)) + int(std::tuple_size_v<decltype(all)>) + std::regex_match(argv[0], words);
}
