program recurse;

uses SysUtils, DateUtils;

function down(left: integer; x: qword): qword;
var i: integer;
begin
  if left = 0 then
  begin
    for i := 1 to 2000 do x := x * 25214903917 + 11;
    down := x
  end
  else
    down := down(left - 1, x + left) xor left
end;

var finish: TDateTime; x: qword; s: ansistring; i: integer;
begin
  finish := IncSecond(Now, 14);
  x := 1;
  while Now < finish do
  begin
    for i := 1 to 100 do x := x + down(40, x);
    s := '';
    for i := 1 to 1000 do s := s + IntToStr(i)
  end;
  writeln(x)
end.
