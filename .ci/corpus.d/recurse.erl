-module(recurse).
-export([main/0]).

down(0, X) -> lists:foldl(fun(I, A) -> (A * 1103515245 + I) band 16#fffffff end, X, lists:seq(1, 500));
down(Left, X) -> (down(Left - 1, X + Left) + Left) band 16#fffffff.

main() -> loop(erlang:monotonic_time(second) + 14, 1), halt().

loop(End, X) ->
    case erlang:monotonic_time(second) < End of
        true -> loop(End, down(40, X));
        false -> io:format("~p~n", [X])
    end.
