/* An extension module: sums a function's results, half of the time in C and half in the Python function. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

__attribute__((noinline)) static double mix(double x)
{
	for (int i = 0; i < 400; i++)
		x = x * 0.999 + 1.0 / (x + i + 1);
	return x;
}

static PyObject *total(PyObject *self, PyObject *arguments)
{
	PyObject *function;
	Py_ssize_t count;
	double sum = 0;

	(void)self;
	if (!PyArg_ParseTuple(arguments, "On", &function, &count))
		return NULL;
	for (Py_ssize_t i = 0; i < count; i++) {
		PyObject *result = PyObject_CallFunction(function, "n", i);
		if (result == NULL)
			return NULL;
		sum += mix(PyFloat_AsDouble(result));
		Py_DECREF(result);
		if (PyErr_Occurred())
			return NULL;
	}
	return PyFloat_FromDouble(sum);
}

static PyMethodDef methods[] = {
	{"total", total, METH_VARARGS, "Sum of the function of 0 to count - 1, mixed."},
	{NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "extension", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit_extension(void)
{
	return PyModule_Create(&module);
}
