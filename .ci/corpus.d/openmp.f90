program openmp
  implicit none
  integer, parameter :: n = 400
  real(8) :: a(n, n), b(n, n), c(n, n), total
  integer :: i, j, k, start, now, rate
  call random_number(a)
  call random_number(b)
  call system_clock(start, rate)
  total = 0
  do
    !$omp parallel do private(i, k)
    do j = 1, n
      do i = 1, n
        c(i, j) = 0
        do k = 1, n
          c(i, j) = c(i, j) + sqrt(abs(a(i, k) * b(k, j)))
        end do
      end do
    end do
    !$omp end parallel do
    total = total + sum(c)
    call system_clock(now)
    if (now - start > 14 * rate) exit
  end do
  print *, total
end program
