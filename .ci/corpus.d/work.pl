use strict;
use warnings;

sub down {
    my ($left, $x) = @_;
    if ($left == 0) {
        $x = ($x * 16807 + $_) % 2147483647 for 1 .. 200;
        return $x;
    }
    return down($left - 1, $x + $left) ^ $left;
}

my ($end, $x) = (time + 14, 1);
while (time < $end) {
    $x ^= down(40, $x) for 1 .. 50;
    my %count;
    $count{$_ % 97}++ for 1 .. 2000;
    $x ^= scalar(() = join(" ", sort keys %count) =~ /\d+/g);
}
print "$x\n";
