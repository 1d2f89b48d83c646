def down(left, x)
  return (1..200).inject(x) { |a, i| (a * 1103515245 + i) & 0xfffffff } if left == 0
  down(left - 1, x + left) ^ left
end

finish = Time.now + 14
x = 1
while Time.now < finish
  50.times { x ^= down(40, x) }
  x ^= (1..2000).map { |i| "w#{i % 97}" }.sort.uniq.join(" ").scan(/w(\d+)/).length
end
puts x
