-- Traces that call and allocate, and what the interpreter runs between them.
local function down(left, x)
  if left == 0 then
    for i = 1, 200 do x = (x * 16807 + i) % 2147483647 end
    return x
  end
  return down(left - 1, x + left) + left
end

local finish, x, t = os.time() + 14, 1, {}
while os.time() < finish do
  for i = 1, 2000 do x = down(20, x) % 2147483647 end
  for i = 1, 20000 do t[i] = tostring(i) .. x end
  table.sort(t)
end
print(x)
